"""One run on all ranks, told on the console."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from dearmpi.cli.console import Console
from dearmpi.cli.console_listener import Narrator, describe_outcome, describe_stop
from dearmpi.cli.endings import RankLog
from dearmpi.cli.start_banner import describe_start
from dearmpi.comm.clock_offset import ClockOffset
from dearmpi.comm.world import World
from dearmpi.engine.trace.span import Span
from dearmpi.errors import DearError
from dearmpi.report.read.trace import find_traces, merged_path, trace_path
from dearmpi.report.read.trace_writer import TraceHeader, TraceWriter
from dearmpi.train.loop.evaluation import Outcome
from dearmpi.train.loop.job import Job
from dearmpi.train.loop.trainer import Trainer
from dearmpi.train.ranks.agreement import together
from dearmpi.train.ranks.stop import EXIT_PREEMPTED, StopRequest
from dearmpi.train.run.planning import CapSearch, PlanFile
from dearmpi.train.run.run_folder import RunFolder
from dearmpi.train.run.session import Session, open_metrics, open_session, own_folder
from dearmpi.train.run.tracing import Tracing
from dearmpi.train.settings.sources import Source, describe_overruled


def run_session(
    world: World,
    sources: Sequence[Source],
    *,
    stop: StopRequest,
    log: RankLog,
    command: Sequence[str],
) -> int:
    """Run to the end or to a stop (collective); returns the exit code."""
    console = Console(speaks=world.is_root, launched=world.size > 1)
    console.say_all(describe_overruled(sources))  # even if the run is then refused
    session = open_session(world, sources)
    console.say_all(session.notes)
    with own_folder(session, command) as folder:
        return _run(session, folder, console, stop, log)


def _run(
    session: Session, folder: RunFolder, console: Console, stop: StopRequest, log: RankLog
) -> int:
    world, job = session.job.world, session.job
    with together(world):
        log.open(folder.log(world.rank), session.describe_rank())
    console.say_all(describe_start(job, session.threads, session.device, folder.path))
    outcome = _train(session, folder, console, stop)
    console.say_all(describe_outcome(job, outcome, folder.path))
    if outcome.stopped:
        number, max_time_s = stop.agreed(world), job.settings.max_time_s
        console.say(describe_stop(number, max_time_s, folder=folder.path))
        return EXIT_PREEMPTED
    if world.is_root and job.task.summarize is not None:
        console.say_all(job.task.summarize(job.task.model))
    return 0


def _train(session: Session, folder: RunFolder, console: Console, stop: StopRequest) -> Outcome:
    job = session.job
    metrics = open_metrics(job, folder)
    tracing = None if session.untraced else open_tracing(job, folder)
    searches = job.settings.plan == "bayes" and job.world.size > 1
    search = CapSearch(job.optimizer, job.world, log=folder.bucket_caps) if searches else None
    narrator = Narrator(job, console, metrics, tracing, PlanFile(job, folder), search)
    narrator.tell_plan()
    if tracing is not None:
        tracing.begin_iteration(job.start_step + 1)
    stop.limit(job.settings.max_time_s)
    trainer = Trainer(
        job,
        folder.path,
        listener=narrator,
        stop_requested=lambda: stop.is_due,
        check_own=folder.check_own,
    )
    try:
        return trainer.run()
    finally:
        if tracing is not None:
            tracing.close()
        console.finish()
        if metrics is not None:
            metrics.close()


@dataclass(frozen=True, slots=True)
class RankTrace:
    """A trace file that knows what it is of.

    make_header: asked at the beginning, since buckets may be laid out anew before.
    """

    writer: TraceWriter
    make_header: Callable[[], TraceHeader]

    def begin(self, clock: ClockOffset, origin_s: float) -> None:
        """Say what the trace is of, and by which clock."""
        self.writer.begin(
            replace(
                self.make_header(),
                origin_s=origin_s,
                offset_s=clock.offset_s,
                uncertainty_s=clock.uncertainty_s,
            )
        )

    def add(self, span: Span) -> None:
        """Keep ``span``."""
        self.writer.add(span)

    def flush(self) -> None:
        """Write what was added."""
        self.writer.flush()

    def close(self) -> None:
        """Write the rest."""
        self.writer.close()


def open_tracing(job: Job, folder: RunFolder) -> Tracing | None:
    """What records the iterations that are to be traced, if any (collective).

    Traces of an earlier part of the run go, merged ones too. Raises AgreedError where a file cannot
    be made.
    """
    window, world = job.settings.trace, job.world
    if window is None:
        return None
    run_id = world.broadcast_text(uuid.uuid4().hex[:12])
    with together(world, root_only=True), _explained(folder):
        if world.is_root:
            for path in find_traces(folder.path).values():
                path.unlink()
            merged_path(folder.path).unlink(missing_ok=True)
    optimizer = job.optimizer

    def make_header() -> TraceHeader:
        return TraceHeader(
            run=folder.path.name,
            run_id=run_id,
            rank=world.rank,
            world_size=world.size,
            host=world.host,
            iterations=window,
            schedule=optimizer.schedule.name,
            bucket_bytes=tuple(bucket.nbytes for bucket in optimizer.layout),
        )

    with together(world), _explained(folder):
        writer = TraceWriter(trace_path(folder.path, world.rank))
    return Tracing(job, window, RankTrace(writer, make_header))


@contextmanager
def _explained(folder: RunFolder) -> Iterator[None]:
    """Inside, a file that cannot be made or removed is told of in a sentence."""
    try:
        yield
    except OSError as error:
        raise DearError(
            f"cannot write traces in {folder.trace}: {error}; mend that, or leave out --trace",
            code="cannot-write",
        ) from error
