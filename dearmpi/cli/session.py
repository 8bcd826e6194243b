"""One run on all ranks, told on the console."""

from __future__ import annotations

from collections.abc import Sequence

from dearmpi.cli.console import Console
from dearmpi.cli.narrator import Narrator, describe_outcome, describe_stop
from dearmpi.cli.opening import describe_start
from dearmpi.cli.rank_log import RankLog
from dearmpi.cli.tracing import open_tracing
from dearmpi.comm.world import World
from dearmpi.train.loop.evaluation import Outcome
from dearmpi.train.loop.trainer import Trainer
from dearmpi.train.ranks.agreement import together
from dearmpi.train.ranks.stop import EXIT_PREEMPTED, StopRequest
from dearmpi.train.run.planning import CapSearch, PlanFile
from dearmpi.train.run.run_folder import RunFolder
from dearmpi.train.run.session import Session, open_metrics, open_session, own_folder
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
