"""Schedules: in which order the collectives of one iteration are posted, and what waits for them.

Reduce-scatters and all-gathers have a lane (and a communicator) each. Within a lane operations are
posted in the order written here on every rank, whatever finishes first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum

from dearmpi.config import Gather, ScheduleName
from dearmpi.errors import ConfigError


class Launch(Enum):
    """When a bucket's reduce-scatter may be posted."""

    GRADIENTS_READY = "gradients ready"
    BACKPROP_END = "backprop end"


class Wait(Enum):
    """Where the compute lane waits for the all-gathers."""

    STEP = "step"
    FEED_FORWARD = "feed-forward"


class Stage(Enum):
    """A part of a bucket's way through one iteration."""

    REDUCE = "reduce-scatter"  # each rank gets the sum of its shard's gradients
    TRANSFORM = "transform"  # of what the stage before has brought, such as a sum into a mean
    UPDATE = "update"
    GATHER = "all-gather"  # of what is there by then: updated parameters, or gradients


def stages_of(gather: Gather) -> tuple[Stage, ...]:
    """The stages of a bucket whose all-gather carries ``gather``, in order."""
    order = {
        "parameters": (Stage.UPDATE, Stage.GATHER),
        "gradients": (Stage.GATHER, Stage.UPDATE),
    }
    return (Stage.REDUCE, Stage.TRANSFORM, *order[gather])


@dataclass(frozen=True, slots=True)
class AllGather:
    """The all-gather of ``bucket``, posted once the reduce-scatter of ``after`` is complete."""

    bucket: int
    after: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The ordered collectives of one iteration, over buckets 0 (first layers) to n - 1."""

    name: str
    reduce_scatters: tuple[int, ...]
    all_gathers: tuple[AllGather, ...]
    launch: Launch
    wait: Wait

    def __post_init__(self) -> None:
        buckets = set(range(len(self.reduce_scatters)))
        gathered = {gather.bucket for gather in self.all_gathers}
        if set(self.reduce_scatters) != buckets or gathered != buckets:
            raise ConfigError(
                f"schedule {self.name} reduces buckets {sorted(self.reduce_scatters)} and gathers "
                f"{sorted(gather.bucket for gather in self.all_gathers)}; each of the "
                f"{len(buckets)} must stand once in both",
                code="plan-inconsistent",
            )
        if len(self.all_gathers) != len(buckets):
            raise ConfigError(
                f"schedule {self.name} gathers a bucket twice", code="plan-inconsistent"
            )
        for gather in self.all_gathers:
            if gather.after not in buckets:
                raise ConfigError(
                    f"schedule {self.name} gathers bucket {gather.bucket} after the reduce-scatter "
                    f"of bucket {gather.after}; there are {len(buckets)} buckets",
                    code="plan-inconsistent",
                )

    def with_last(self, late: Collection[int]) -> tuple[tuple[int, ...], tuple[AllGather, ...]]:
        """The reduce-scatters, and the all-gathers, in an order where those of the ``late`` buckets
        hold up no others.

        A gather that a feed-forward waits for keeps its place: the step launches what is late, and
        other gathers come before it where the last layers are.
        """
        order, gathers = self.reduce_scatters, self.all_gathers
        if late:
            order = tuple(sorted(order, key=lambda bucket: bucket in late))
            if self.wait is Wait.STEP:
                gathers = tuple(sorted(gathers, key=lambda gather: gather.bucket in late))
        return order, gathers

    def sequence(self, *, without: Collection[int] = ()) -> str:
        """Operations in order of posting if all take equally long; ``|`` is the end of backprop.

        without: buckets that do not travel.
        """
        lanes = _walk(self)
        hidden = {f"{kind}{bucket}" for kind in ("RS", "AG") for bucket in without}
        network = [op for op in lanes.network if op.label not in hidden]
        before = [op.label for op in network if op.start < lanes.step]
        after = [op.label for op in network if op.start >= lanes.step]
        return " ".join([*before, "|", *after]).strip()

    def render(self) -> str:
        """Both lanes of a steady iteration, every operation one column wide.

        Begins with backprop (``B``), ``|`` is its end, and ends with the feed-forward (``F``).
        """
        lanes = _walk(self)
        columns = 1 + max(op.start for op in (*lanes.compute, *lanes.network))
        width = max(len(op.label) for op in lanes.network) + 1
        rows = []
        for title, ops in (("compute", lanes.compute), ("network", lanes.network)):
            cells = [" " * width] * columns
            for op in ops:
                cells[op.start] = op.label.ljust(width)
            row = "".join(cells[: lanes.step]) + "| " + "".join(cells[lanes.step :])
            rows.append(f"{title}  {row}".rstrip())
        return "\n".join(rows)


@dataclass(frozen=True, slots=True)
class Conduct:
    """How buckets travel: in the order of ``schedule``, with settings of ``EngineConfig``.

    window: most operations of a kind in flight. eager: whether they are updated during backprop.
    gather: what the all-gathers carry, parameters or gradients.
    """

    schedule: Schedule
    window: int
    eager: bool
    gather: Gather = "parameters"

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What each bucket passes, in order."""
        return stages_of(self.gather)

    def stage_before(self, stage: Stage) -> Stage:
        """The stage whose end ``stage`` waits for; transforms end with the stage before them."""
        earlier = self.stages[: self.stages.index(stage)]
        return next(one for one in reversed(earlier) if one is not Stage.TRANSFORM)

    @property
    def waits_in_step(self) -> bool:
        """Whether ``step()`` waits for all gathers, and not the next feed-forward."""
        return self.schedule.wait is Wait.STEP

    @property
    def last_before_step(self) -> Stage:
        """The last stage that may end before ``step()`` has given the options of the update. Where
        a feed-forward waits for gathers, a further backprop may still add to what is gathered.
        """
        last = Stage.REDUCE
        for stage in self.stages:
            if stage is Stage.UPDATE or (stage is Stage.GATHER and not self.waits_in_step):
                break
            last = last if stage is Stage.TRANSFORM else stage
        return last


def serial(num_buckets: int) -> Schedule:
    """Every bucket's all-reduce after backprop; the step waits for all of them."""
    return _all_reduce("serial", num_buckets, Launch.BACKPROP_END)


def wfbp(num_buckets: int) -> Schedule:
    """Wait-free backprop: a bucket's all-reduce as soon as its gradients are ready."""
    return _all_reduce("wfbp", num_buckets, Launch.GRADIENTS_READY)


def dear(num_buckets: int) -> Schedule:
    """Reduce-scatters behind backprop, all-gathers behind the next feed-forward (paper, III)."""
    return Schedule(
        name="dear",
        reduce_scatters=tuple(reversed(range(num_buckets))),
        all_gathers=tuple(AllGather(bucket, after=0) for bucket in range(num_buckets)),
        launch=Launch.GRADIENTS_READY,
        wait=Wait.FEED_FORWARD,
    )


def build_schedule(name: ScheduleName, num_buckets: int) -> Schedule:
    """The schedule called ``name`` over ``num_buckets`` buckets."""
    builders: dict[ScheduleName, Callable[[int], Schedule]] = {
        "serial": serial,
        "wfbp": wfbp,
        "dear": dear,
    }
    return builders[name](num_buckets)


def _all_reduce(name: str, num_buckets: int, launch: Launch) -> Schedule:
    order = tuple(reversed(range(num_buckets)))
    gathers = tuple(AllGather(bucket, after=bucket) for bucket in order)
    return Schedule(name, order, gathers, launch, Wait.STEP)


@dataclass(frozen=True, slots=True)
class _Placed:
    label: str
    start: int


@dataclass(frozen=True, slots=True)
class _Lanes:
    compute: tuple[_Placed, ...]
    network: tuple[_Placed, ...]
    step: int


def _walk(schedule: Schedule) -> _Lanes:
    """Place every operation, each one column long, the network carrying one at a time."""
    count = len(schedule.reduce_scatters)
    step = count
    produced = {bucket: count - bucket for bucket in range(count)}
    if schedule.launch is Launch.BACKPROP_END:
        produced = dict.fromkeys(produced, step)
    reduced: dict[int, int] = {}
    gathered: dict[int, int] = {}
    network: list[_Placed] = []
    scatters, gathers = list(schedule.reduce_scatters), list(schedule.all_gathers)
    now = 0
    while scatters or gathers:
        ready = _gather_ready(gathers[0], reduced) if gathers else None
        if ready is not None and ready <= now:
            gather = gathers.pop(0)
            network.append(_Placed(f"AG{gather.bucket}", now))
            gathered[gather.bucket] = now + 1
        elif scatters and produced[scatters[0]] <= now:
            bucket = scatters.pop(0)
            network.append(_Placed(f"RS{bucket}", now))
            reduced[bucket] = now + 1
        now += 1
    compute = [_Placed(f"B{count - 1 - place}", place) for place in range(count)]
    now = step if schedule.wait is Wait.FEED_FORWARD else max([step, *gathered.values()])
    for bucket in range(count):
        now = max(now, gathered[bucket])
        compute.append(_Placed(f"F{bucket}", now))
        now += 1
    return _Lanes(tuple(compute), tuple(network), step)


def _gather_ready(gather: AllGather, reduced: dict[int, int]) -> int | None:
    """The column from which ``gather`` may run, or None while a reduce-scatter is missing."""
    if gather.bucket not in reduced or gather.after not in reduced:
        return None
    return max(reduced[gather.bucket], reduced[gather.after])
