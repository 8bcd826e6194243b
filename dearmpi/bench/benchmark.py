"""Benchmark: from its settings to its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dearmpi.bench.comparison import LINK_WARM_UP_S, Keep, Length, Tell, buckets_of, compare_methods
from dearmpi.bench.link import measure_link
from dearmpi.bench.method import Method, Setup, find_missing
from dearmpi.bench.method_names import plug_in, read_method
from dearmpi.bench.process_memory import reuse_pages
from dearmpi.bench.replay import ReplayModel
from dearmpi.bench.result import Result
from dearmpi.bench.workload_model import ReplayedModel, WorkloadModel, task_model
from dearmpi.comm.world import World
from dearmpi.config import CommDtype, EngineConfig
from dearmpi.errors import ConfigError, TaskError
from dearmpi.plan.data.workload import Workload, is_workload, read_workload, workload_names
from dearmpi.plan.model.profile import ModelProfile, profile_workload, read_profile
from dearmpi.report.draw.units import time_text
from dearmpi.train.ranks.agreement import together
from dearmpi.train.ranks.random_state import seed_all
from dearmpi.train.ranks.threads import choose_threads
from dearmpi.train.tasks.task_registry import build_task

_FEED_FORWARD_SHARE = 1 / 3  # backprop takes about twice as long
_NUM_TRIALS = 3
_PROFILE_SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class BenchmarkSettings:
    """What to measure.

    workload: a replayed model, the file of a measured profile, or a task of ``dear-train run``.
    methods, plug_ins: as ``read_method`` and ``plug_in`` take them.
    ratio: communication alone over computation; or the two times of a replay. All None: 1.
    batch_size: per rank; None: the workload's own. comm_dtype: in what methods send fp32 that do
    not say so themselves, and in what communication alone is measured.
    """

    workload: str
    methods: Sequence[str]
    plug_ins: Sequence[str] = ()
    ratio: float | None = None
    feed_forward_s: float | None = None
    backprop_s: float | None = None
    batch_size: int | None = None
    comm_dtype: CommDtype = "fp32"
    length: Length = Length()

    def __post_init__(self) -> None:
        times = (self.feed_forward_s, self.backprop_s)
        if self.ratio is not None and times != (None, None):
            raise ConfigError(
                "a ratio sets the compute time; give either it or the times",
                code="settings-contradict",
            )
        if self.ratio is not None and not 0.01 <= self.ratio <= 100:
            raise ConfigError(
                f"ratio is {self.ratio}; it must be from 0.01 to 100", code="out-of-range"
            )
        if (times[0] is None) != (times[1] is None):
            raise ConfigError(
                "feed-forward and backprop time must be given together", code="setting-missing"
            )
        for seconds in times:
            if seconds is not None and not 0 < seconds <= 3600:
                raise ConfigError(
                    f"a compute time is {seconds} s; it must be above 0, at most 3600",
                    code="out-of-range",
                )
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(
                f"batch size is {self.batch_size}; it must be at least 1", code="out-of-range"
            )

    def read_methods(self) -> list[Method]:
        """All methods, in order. Raises ConfigError for one that does not exist or comes twice."""
        methods = [
            *(read_method(text, comm_dtype=self.comm_dtype) for text in self.methods),
            *(plug_in(text, comm_dtype=self.comm_dtype) for text in self.plug_ins),
        ]
        labels = [method.label for method in methods if method.label != "alone"]
        if not labels:
            raise ConfigError(
                "no method to measure; give some, such as dear,ddp", code="setting-missing"
            )
        for label in labels:
            if labels.count(label) > 1:
                raise ConfigError(
                    f"method {label} is given {labels.count(label)} times", code="given-twice"
                )
        return [method for method in methods if method.label != "alone"]


def run_benchmark(
    world: World, settings: BenchmarkSettings, tell: Tell, *, keep: Keep = lambda result: None
) -> Result:
    """Measure (collective). ``tell`` is given lines as things happen, ``keep`` what there is after
    each block.

    Raises AgreedError on all ranks for what cannot be measured.
    """
    with together(world):
        methods = settings.read_methods()
    missing = find_missing(world, methods, tell)
    workload = make_workload_model(world, settings, tell)
    _check_methods(world, workload, methods)
    return compare_methods(
        world,
        workload,
        methods,
        length=settings.length,
        tell=tell,
        keep=keep,
        comm_dtype=settings.comm_dtype,
        missing=missing,
    )


def _check_methods(world: World, workload: WorkloadModel, methods: Sequence[Method]) -> None:
    """Raise AgreedError on all ranks for a method that cannot train this workload (collective).

    Now, before hours are spent on the others.
    """
    with together(world):
        model = workload.build()
        for method in methods:
            try:
                method.check(Setup(world, model, workload.make_optimizer, method.options))
            except ConfigError as error:
                raise ConfigError(f"method {method.label!r}: {error}", code=error.code) from error


def make_workload_model(world: World, settings: BenchmarkSettings, tell: Tell) -> WorkloadModel:
    """The workload model of ``settings``, and torch's threads set for it (collective).

    Raises AgreedError on all ranks for what cannot be measured.
    """
    threads = choose_threads(world, requested=None, progress_thread=world.has_progress_thread)
    tell(f"torch threads per rank: {threads.count} ({threads.reason})")
    with together(world):
        workload = read_workload(settings.workload) if is_workload(settings.workload) else None
        profile = _read_profile(settings) if settings.workload.endswith(_PROFILE_SUFFIX) else None
        if workload is None and profile is None:
            return _make_task_model(world, settings)
    if workload is not None:
        profile = _divide_time(world, settings, workload, tell)
    assert profile is not None
    reuse_pages()
    return _make_replay(world, settings, profile, tell)


def _make_task_model(world: World, settings: BenchmarkSettings) -> WorkloadModel:
    if settings.ratio is not None or settings.feed_forward_s is not None:
        raise ConfigError(
            f"the compute time of {settings.workload} is real and cannot be set; leave out the "
            f"ratio and the times, or replay one of {', '.join(workload_names())}",
            code="setting-without-effect",
        )
    seed_all(0)
    try:
        task = build_task(settings.workload, {})
    except TaskError as error:
        raise TaskError(
            f"{error}; beside tasks, workloads are {', '.join(workload_names())} and "
            "equal:MB[:LAYERS]",
            code=error.code,
        ) from error
    default = task.defaults.get("batch_size", 16)
    assert isinstance(default, int)
    batch_size = settings.batch_size or default
    return task_model(task, batch_size=batch_size, rank=world.rank, world_size=world.size)


def _read_profile(settings: BenchmarkSettings) -> ModelProfile:
    if settings.ratio is not None or settings.feed_forward_s is not None:
        raise ConfigError(
            f"the compute times stand in {settings.workload}; leave out the ratio and the times",
            code="setting-without-effect",
        )
    profile = read_profile(settings.workload)
    measured = profile.workload.batch_size
    if settings.batch_size not in (None, measured):
        raise ConfigError(
            f"the times in {settings.workload} are of {measured} samples per rank, and the batch "
            f"size is {settings.batch_size}; leave it out, or profile that batch size",
            code="samples-misfit",
        )
    return profile


def _divide_time(
    world: World, settings: BenchmarkSettings, workload: Workload, tell: Tell
) -> ModelProfile:
    """``workload`` with the times of ``settings``, or with times that give the ratio."""
    feed_forward_s, backprop_s = settings.feed_forward_s, settings.backprop_s
    if feed_forward_s is None or backprop_s is None:
        compute_s = _communication_s(world, workload, settings.comm_dtype, tell) / (
            settings.ratio or 1.0
        )
        feed_forward_s = compute_s * _FEED_FORWARD_SHARE
        backprop_s = compute_s - feed_forward_s
    return profile_workload(workload, feed_forward_s=feed_forward_s, backprop_s=backprop_s)


def _make_replay(
    world: World, settings: BenchmarkSettings, profile: ModelProfile, tell: Tell
) -> ReplayedModel:
    tell(
        f"compute time: feed-forward {time_text(profile.feed_forward_s)}, "
        f"backprop {time_text(profile.backprop_s)}"
    )
    return ReplayedModel(
        profile,
        batch_size=settings.batch_size or profile.workload.batch_size,
        rank=world.rank,
        world_size=world.size,
    )


def _communication_s(world: World, workload: Workload, comm_dtype: CommDtype, tell: Tell) -> float:
    """The median of a few trials of communication alone; a ratio needs it beforehand."""
    if world.size == 1:
        raise ConfigError(
            "one rank has no communication to set the compute time by; give --feed-forward-s and "
            "--backprop-s, or start several ranks with mpirun",
            code="one-rank-only",
        )
    tell("measuring communication alone")
    profile = profile_workload(workload, feed_forward_s=0, backprop_s=0)
    buckets = buckets_of(world, ReplayModel(profile))
    config = EngineConfig(comm_dtype=comm_dtype)
    trials = measure_link(world, buckets, config, repeats=_NUM_TRIALS, warm_up_s=LINK_WARM_UP_S)
    return float(torch.tensor([trial.total_s for trial in trials]).median())
