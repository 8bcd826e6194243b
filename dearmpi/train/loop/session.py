"""Session: what comes before training, on all ranks together.

Its phases: find the run's location and its checkpoint; build the task and settle the settings;
compare the ranks; distribute the optimizer; make the run folder. Nothing is written before the
last of them, so what is refused leaves everything as it was.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml

from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from dearmpi.train.checkpoint.snapshot import Snapshot
from dearmpi.train.checkpoint.survey import go_back
from dearmpi.train.loop.job import Job, check_position, prepare, share_samples
from dearmpi.train.loop.optimizers import OptimizerChoice, choose_optimizer
from dearmpi.train.loop.planning import why_untraceable
from dearmpi.train.metrics.metrics import MetricsLog
from dearmpi.train.metrics.trackers import TrackedRun, Trackers, check_trackers
from dearmpi.train.ranks.agreement import together
from dearmpi.train.ranks.device import DeviceChoice, allow_deterministic_only, choose_device
from dearmpi.train.ranks.random_state import seed_all
from dearmpi.train.ranks.threads import ThreadChoice, choose_threads
from dearmpi.train.run.balance import numbers_of_ranks, warn_of_batch_norm
from dearmpi.train.run.environment import (
    argument_fingerprints,
    code_fingerprint,
    compare,
    data_fingerprints,
    describe_environment,
    model_fingerprints,
    model_lines,
)
from dearmpi.train.run.resuming import load_together
from dearmpi.train.run.run_folder import RunFolder
from dearmpi.train.run.run_location import (
    RunLocation,
    agree_on_location,
    check_reachable,
    check_unchanged,
    hold_folder,
)
from dearmpi.train.settings.settings import RunSettings, check_resumable
from dearmpi.train.settings.sources import (
    BEFORE_THE_TASK,
    OF_DEVICES,
    Source,
    before_task,
    from_algorithm,
    from_checkpoint,
    from_task,
    merge,
    resolve,
    without,
)
from dearmpi.train.tasks.task import Task
from dearmpi.train.tasks.task_registry import build_task


@dataclass(frozen=True, slots=True)
class Session:
    """A run that all ranks agree on, before anything is written.

    untraced: why no iteration is recorded, although ``trace`` is set.
    """

    location: RunLocation
    job: Job
    threads: ThreadChoice
    device: DeviceChoice
    untraced: str = ""

    @property
    def notes(self) -> list[str]:
        """What people should know before it starts."""
        untraced = [f"nothing is recorded: {self.untraced}"] if self.untraced else []
        crowded = [*self.threads.warnings, *self.device.warnings]
        job = self.job
        found = warn_of_batch_norm(job.settings.batch_shares, job.world, job.task.model)
        uneven = [f"warning: {text}" for text in found]
        return [*self.location.notes, *crowded, *job.curve.notes, *uneven, *untraced]

    def describe_rank(self) -> str:
        """One line about this rank."""
        world = self.job.world
        return (
            f"rank {world.rank} of {world.size} on {world.host}, "
            f"Python {platform.python_version()}, torch {torch.__version__}, "
            f"torch threads: {self.threads.count} ({self.threads.reason}), "
            f"device: {self.device.device} ({self.device.reason})"
        )


def open_session(world: World, sources: Sequence[Source]) -> Session:
    """Build and compare everything that a run needs (collective).

    sources: what the user chose. Raises AgreedError or MismatchError on all ranks alike.
    """
    compare(world, {"code": code_fingerprint(), **argument_fingerprints(merge(sources))})
    location = agree_on_location(world, merge(sources), default_root=RunSettings().run_folder)
    snapshot = None if location.checkpoint is None else load_together(world, location.checkpoint)
    with together(world):
        if snapshot is not None:
            stored = _stored_source(snapshot, origin=str(location.checkpoint))
            if snapshot.meta.get("world_size") != world.size:
                stored = without(stored, numbers_of_ranks(stored.values))
            sources = [*sources, stored]
            # Before the task is built, to which the options of another one mean nothing.
            check_resumable(stored.values, before_task(sources), names=BEFORE_THE_TASK)
        basis = before_task(sources)
    threads = choose_threads(
        world,
        requested=basis.threads,
        progress_thread=world.has_progress_thread,
        num_workers=basis.workers,
    )
    device = choose_device(world, basis.device)
    if device.device.type == "cpu":  # where a run that was begun on devices may go on
        sources = [without(a, OF_DEVICES) if a.kind == "checkpoint" else a for a in sources]
    with together(world):
        allow_deterministic_only(basis.deterministic)
        seed_all(basis.seed)
        task = build_task(basis.task, basis.all_task_options)
        task.model.to(device.device)
        settings, choice = settle(sources, task, snapshot)
        settings = replace(settings, run_folder=str(location.root), name=location.name)
        share_samples(settings, task, world, snapshot)
    _compare_built(world, settings, task)
    kept = (
        RunFolder(location.root / location.name).plan if _has_planned(location, snapshot) else None
    )
    job = prepare(world, settings, task, choice=choice, snapshot=snapshot, kept_plan=kept)
    untraced = "" if settings.trace is None else why_untraceable(settings.trace, job)
    with together(world):
        # The very command of a run that goes on may ask for what an earlier part has recorded.
        if untraced and not (location.continued and job.start_step):
            raise ConfigError(untraced, code="untraceable-iterations")
    return Session(location, job, threads, device, untraced)


def _compare_built(world: World, settings: RunSettings, task: Task) -> None:
    """Raise MismatchError unless all ranks have built the same (collective)."""
    fingerprints = argument_fingerprints(settings.as_plain()) | data_fingerprints(task)
    state = task.model.state_dict()
    compare(world, fingerprints | model_fingerprints(state), model_lines(state))


def _stored_source(snapshot: Snapshot, *, origin: str) -> Source:
    return from_checkpoint(snapshot.meta.get("config", {}), origin=origin)


def _has_planned(location: RunLocation, snapshot: Snapshot | None) -> bool:
    """Whether an earlier part of this very run may have made a plan for itself."""
    stored = {} if snapshot is None else snapshot.meta.get("config", {})
    return location.continued and stored.get("plan", "auto") == "auto"


def settle(
    sources: Sequence[Source], task: Task, snapshot: Snapshot | None
) -> tuple[RunSettings, OptimizerChoice]:
    """The run's settings, with the task's recommendations in the location of what is not chosen.

    Raises ConfigError for what has no effect or cannot be had, and where the run to resume has
    other settings; CheckpointError where it had other data.
    """
    of_task = from_task(task.defaults, task=task.name)
    settings = resolve([*sources, from_algorithm(sources), of_task])
    choice = choose_optimizer(settings)
    settings = replace(settings, lr=choice.lr, optimizer=choice.name)
    if settings.epochs is None and settings.max_steps is None:
        settings = replace(settings, epochs=1)
    for name in ("eval_interval", "keep_best", "patience"):
        if getattr(settings, name) and task.eval_data is None:
            raise ConfigError(
                f"{name} {getattr(settings, name)} has no effect: task {task.name} has no "
                "held-out data; leave it out",
                code="setting-without-effect",
            )
    check_trackers(settings.trackers)
    if snapshot is not None:
        check_resumable(_stored_source(snapshot, origin="the checkpoint").values, settings)
        check_position(snapshot, task)
    return settings, choice


@contextmanager
def own_folder(session: Session, command: Sequence[str]) -> Iterator[RunFolder]:
    """Make the run folder, and put into it what describes the run (collective); inside, no other
    job has it.
    """
    world, location = session.job.world, session.location

    def prepare(folder: RunFolder) -> None:
        check_unchanged(location)
        if location.checkpoint is not None:
            go_back(folder.path, location.checkpoint)
        _describe(session, folder, command)

    with together(world, root_only=True):
        if world.is_root:
            check_reachable(location)
    with hold_folder(
        world, location.root, location.name, resume=location.continued, prepare=prepare
    ) as folder:
        yield folder


def _describe(session: Session, folder: RunFolder, command: Sequence[str]) -> None:
    world, begun_from = session.job.world, session.location.begun_from
    if begun_from is not None:
        folder.write_begun_from(begun_from)
    folder.write_config(yaml.safe_dump(session.job.settings.as_plain(), sort_keys=False))
    folder.write_environment(
        describe_environment(
            world_size=world.size,
            hosts=world.hosts,
            command=command,
            folder=Path.cwd(),
            threads_reason=session.threads.reason,
            units=_describe_units(session.job.task),
        )
    )


def _describe_units(task: Task) -> dict[str, str | float]:
    """What the console shows of throughput and loss, for the report."""
    return {
        "rate": task.unit,
        "per_sample": task.units_per_sample,
        "loss": task.loss_scale_name,
        "loss_scale": task.loss_scale,
    }


def open_metrics(job: Job, folder: RunFolder) -> MetricsLog | None:
    """The metrics of the run, on rank 0; rows of an earlier part after its checkpoint go
    (collective).
    """
    with together(job.world, root_only=True):
        if not job.world.is_root:
            return None
        resume_step = job.start_step if folder.metrics_csv.exists() else None
        tracked = TrackedRun(folder.path, job.settings.as_plain(), resume_step)
        return MetricsLog(
            folder.path,
            extra=() if job.evaluator is None else job.evaluator.names,
            resume_step=resume_step,
            trackers=Trackers(job.settings.trackers, tracked),
        )
