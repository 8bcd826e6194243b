"""One run on all ranks, told on the console."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dearmpi.cli.console import Console
from dearmpi.cli.console_listener import ConsoleListener, describe_outcome, describe_stop
from dearmpi.cli.endings import RankLog
from dearmpi.comm.world import World
from dearmpi.config import LEAST_COMPRESSED
from dearmpi.engine.optimizer import DistributedOptimizer
from dearmpi.engine.setup.self_planning import MOST_STEPS, NUM_PROFILED, NUM_WARMUP
from dearmpi.local.local_optimizer import LocalOptimizer
from dearmpi.local.scaffnew import Scaffnew
from dearmpi.report.draw.units import count_text
from dearmpi.train.loop.evaluation import Outcome
from dearmpi.train.loop.job import LEAST_STEPS_TO_PLAN, Job
from dearmpi.train.loop.planning import NUM_TRIALS, STEPS_PER_TRIAL, CapSearch, PlanFile
from dearmpi.train.loop.session import Session, open_metrics, open_session, own_folder
from dearmpi.train.loop.trainer import Trainer
from dearmpi.train.ranks.agreement import together
from dearmpi.train.ranks.device import DeviceChoice
from dearmpi.train.ranks.stop import EXIT_PREEMPTED, StopRequest
from dearmpi.train.ranks.threads import ThreadChoice
from dearmpi.train.run.balance import describe_shares
from dearmpi.train.run.run_folder import RunFolder
from dearmpi.train.run.tracing import open_tracing
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
    console.say(*describe_overruled(sources))  # even if the run is then refused
    session = open_session(world, sources)
    console.say(*session.notes)
    with own_folder(session, command) as folder:
        return _run(session, folder, console, stop, log)


def _run(
    session: Session, folder: RunFolder, console: Console, stop: StopRequest, log: RankLog
) -> int:
    world, job = session.job.world, session.job
    with together(world):
        log.open(folder.log(world.rank), session.describe_rank())
    console.say(*describe_start(job, session.threads, session.device, folder.path))
    outcome = _train(session, folder, console, stop)
    console.say(*describe_outcome(job, outcome, folder.path))
    if outcome.stopped:
        number, max_time_s = stop.agreed(world), job.settings.max_time_s
        console.say(describe_stop(number, max_time_s, folder=folder.path))
        return EXIT_PREEMPTED
    if world.is_root and job.task.summarize is not None:
        console.say(*job.task.summarize(job.evaluated_model))
    return 0


def _train(session: Session, folder: RunFolder, console: Console, stop: StopRequest) -> Outcome:
    job = session.job
    metrics = open_metrics(job, folder)
    window = None if session.untraced else job.settings.trace
    tracing, search = None, None
    if isinstance(job.optimizer, DistributedOptimizer):  # local steps have neither
        tracing = open_tracing(job.task.model, job.optimizer, window, folder)
        if job.settings.plan == "bayes" and job.world.size > 1:
            search = CapSearch(job.optimizer, job.world, log=folder.bucket_caps)
    listener = ConsoleListener(job, console, metrics, tracing, PlanFile(job, folder), search)
    listener.tell_plan()
    if tracing is not None:
        tracing.begin_iteration(job.start_step + 1)
    stop.limit(job.settings.max_time_s)
    trainer = Trainer(
        job,
        folder.path,
        listener=listener,
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


def describe_start(
    job: Job, threads: ThreadChoice, device: DeviceChoice, folder: Path
) -> list[str]:
    """What runs, where and with what."""
    settings, task, world = job.settings, job.task, job.world
    num_hosts = len(set(world.hosts))
    num_parameters = sum(p.numel() for p in task.model.parameters())
    lines = [
        f"{task.name} on {count_text(world.size, 'rank')}, {count_text(num_hosts, 'host')}; torch "
        f"threads per rank: {threads.count} ({threads.reason})",
        _describe_device(job, device),
        *task.notes,
        f"model: {num_parameters:,} parameters; {settings.optimizer}, lr {settings.lr:g}, "
        f"{settings.lr_schedule}; {settings.precision}",
    ]
    if world.size > 1:
        lines.append(_describe_communication(job))
    if job.local is not None:
        lines.append(_describe_local(job.local, settings.algorithm or "diloco"))
    lines.extend(_describe_planning(job))
    if settings.workers:
        workers = count_text(settings.workers, "worker")
        lines.append(f"data: loaded ahead by {workers} beside each rank")
    if settings.ema is not None:
        lines.append(
            f"ema {settings.ema:g}: held-out losses, and the model that is exported, are of the "
            "moving average of the parameters"
        )
    if settings.batch_shares != "even" and world.size > 1:
        lines.append(describe_shares(job.batches))
    lines.append(_describe_length(job))
    if job.start_step:
        lines.append(f"resumed at step {job.start_step}{_describe_rest(job)}")
    return [*lines, f"run folder: {folder}"]


def _describe_communication(job: Job) -> str:
    settings, optimizer = job.settings, job.optimizer
    return (
        f"communication: schedule {optimizer.schedule.name}, gather {settings.gather}, "
        f"reduce-scatter {settings.reduce_scatter}, {_describe_topology(job)}"
        f"{count_text(len(optimizer.layout), 'bucket')}, {_describe_compression(job)}"
        f"progress by {job.world.progress.mode}; exposed: share of step time spent waiting for it; "
        "hidden: share of it that computation covered"
    )


def _describe_compression(job: Job) -> str:
    """How many buckets are large and wide enough for the codec, if there is one for buckets."""
    name = job.optimizer.config.compress
    if name in ("none", "auto") or job.local is not None:  # which sends fragments
        return ""
    num = sum(
        bucket.trained
        and bucket.dtype in ("float32", "float64")
        and bucket.padded_numel >= LEAST_COMPRESSED
        for bucket in job.optimizer.layout
    )
    told = f"compress {name} of {num} of them"
    if num:
        return f"{told}, "
    return f"{told}, since none has {LEAST_COMPRESSED:,} elements of fp32 or fp64, "


def _describe_topology(job: Job) -> str:
    """The grid in use, where one was asked for, and what it was chosen for; empty for none."""
    asked, used = job.settings.topology, job.optimizer.topology
    if asked == "flat":
        return ""
    named = f"topology {asked}" if asked == used else f"topology {asked} is {used}"
    reason = job.optimizer.topology_choice
    return f"{named} ({reason}), " if reason else f"{named}, "


def _describe_local(local: LocalOptimizer, algorithm: str) -> str:
    """When ranks exchange, and what is shown of them."""
    schedule = local.exchanges
    when = (
        f"every {schedule.sync_every} steps, {count_text(schedule.fragments, 'fragment')}, "
        f"delay {schedule.delay}, mix {local.mix:g}"
    )
    if isinstance(local, Scaffnew):
        rule = local.rule
        when = (
            f"after a step with chance {rule.p:g}; {rule.cohort} of {rule.num_clients} ranks take "
            f"part, {rule.sparsity} in each coordinate"
        )
    shown = "evaluations and checkpoints show what ranks share"
    return f"local steps ({algorithm}): an exchange {when}; {shown}"


def _describe_device(job: Job, device: DeviceChoice) -> str:
    """Where rank 0's tensors are, and why; told of a host too, on which a GPU may lie idle."""
    said = f"tensors on {device.device}: {device.reason}"
    if job.world.size > 1 and device.device.type != "cpu":
        said += f"; to MPI {job.optimizer.way_to_mpi}"
    return said


def _describe_length(job: Job) -> str:
    batch_size, num_samples = job.settings.batch_size, job.batches.num_samples
    if num_samples is None:
        return f"length: {job.total_steps} steps of {batch_size} samples of a stream, in its order"
    samples = f"{batch_size} samples"
    if batch_size > num_samples:
        samples = f"{num_samples} samples, all that there are, for a batch size of {batch_size}"
    epochs = job.total_steps / job.batches.steps_per_epoch
    return f"length: {job.total_steps} steps of {samples} ({epochs:.2f} epochs)"


def _describe_rest(job: Job) -> str:
    if job.start_step < job.total_steps:
        if not job.best.is_over:
            return ""
        num = job.best.num_worse
        return (
            f": nothing is left to train, since the run ended early, after {num} evaluations "
            f"without a lower held-out loss; to go on, give --patience more than {num}"
        )
    return (
        ": nothing is left to train; --epochs and --max-steps count from the run's beginning, so "
        f"give more than the {job.start_step} steps that it has"
    )


def _describe_planning(job: Job) -> list[str]:
    """A line on a plan that is made while training; none where none was asked for nor is made."""
    plan, optimizer = job.settings.plan, job.optimizer
    if plan in ("auto", "bayes") and job.world.size == 1:
        return [f"plan {plan} has no effect: one rank sends nothing"]
    num_left = job.total_steps - job.start_step
    if plan == "bayes":
        line = f"plan: bayes, {NUM_TRIALS} bucket caps are tried for {STEPS_PER_TRIAL} steps each"
        if num_left <= NUM_TRIALS * STEPS_PER_TRIAL:
            line += f"; the run ends with that, since {num_left} steps are left"
        return [line]
    if plan in (None, "auto") and optimizer.plan is not None:
        return ["plan: auto, the one that this run has made before"]
    if optimizer.is_planning:
        default = "" if plan == "auto" else ", the default over several hosts"
        return [
            f"plan: auto{default}; made from the times of the first {NUM_WARMUP + NUM_PROFILED} "
            f"steps, and taken up after {MOST_STEPS} at the latest"
        ]
    if plan == "auto":
        return [
            f"plan: none, since auto pays from {LEAST_STEPS_TO_PLAN} steps on, and "
            f"{num_left} are left"
        ]
    return []
