"""The trace of a run: from its settings to a file of each rank."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from dearmpi.comm.clock_offset import ClockOffset
from dearmpi.engine.trace.span import Span
from dearmpi.errors import DearError
from dearmpi.report.read.trace import find_traces, merged_path, trace_path
from dearmpi.report.read.trace_writer import TraceHeader, TraceWriter
from dearmpi.train.loop.job import Job
from dearmpi.train.ranks.agreement import together
from dearmpi.train.run.run_folder import RunFolder
from dearmpi.train.run.tracing import Tracing


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
            f"cannot write traces in {folder.trace}: {error}; mend that, or leave out --trace"
        ) from error
