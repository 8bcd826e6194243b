"""Methods: how other systems and this one would move a model's gradients, ready to be simulated.

All-reduces are one operation each, one at a time in the order of their start: so NCCL, gloo and
MPI do it for one communicator. That is a reduce-scatter that costs both halves, followed by an
all-gather that costs nothing, with one in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dearmpi.config import MIB, EngineConfig, known_names
from dearmpi.cuts import Cuts
from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import BucketLayout, ParamSpec, build_layout, fuse_by_cap
from dearmpi.plan.data.schedule import AllGather, Conduct, Launch, Schedule, Wait, dear
from dearmpi.plan.model.cost import Costs, LinkModel
from dearmpi.plan.model.profile import ModelProfile
from dearmpi.plan.rivals.merging import (
    FusedGradients,
    fuse_by_cycle,
    fuse_until,
    merge_where_start_up_is_saved,
    partition,
    prioritise,
    ready_gradients,
)
from dearmpi.plan.search.planner import make_plan
from dearmpi.plan.simulate.timeline import Timeline, simulate

WINDOW = EngineConfig().window
_NOTHING = LinkModel(0.0, 0.0)
_FIRST_MB, _CAP_MB = 1.0, 25.0  # of DDP as it comes
_CYCLE_MS, _LEAST_CYCLE_MS, _MOST_CYCLE_MS = 1.0, 1e-3, 1000.0
_PARTITION_NUMEL, _CREDIT_NUMEL = 8_000_000, 16_000_000


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """What a method makes of a model and costs: the arguments of ``simulate``, eager as in
    ``dear-train``.
    """

    profile: ModelProfile
    layout: BucketLayout
    conduct: Conduct
    costs: Costs
    not_before_s: tuple[float, ...] | None = None

    @property
    def buffers(self) -> list[tuple[Cuts, int]]:
        """What is reduced, in order: where it is cut, and bytes of an element in memory."""
        buckets = [self.layout.buckets[index] for index in self.conduct.schedule.reduce_scatters]
        return [(bucket.cuts, bucket.itemsize) for bucket in buckets if bucket.trained]

    def run(self) -> Timeline:
        """The steady iteration."""
        return simulate(
            self.profile, self.layout, self.conduct, self.costs, not_before_s=self.not_before_s
        )


@dataclass(frozen=True, slots=True)
class SimulatedMethod:
    """A way to train. cap_mb: MiB that a bucket is filled to, where the method has a cap.

    about: its rule. numbers: the rule's numbers, in words. source: where it is described.
    is_dear: whether it gathers behind the feed-forward, as DeAR.
    """

    name: str
    about: str
    source: str
    build: Callable[[ModelProfile, Costs, float | None], SimulationSetup]
    cap_mb: float | None = None
    takes_cap: bool = False
    is_dear: bool = False
    numbers: str = ""

    def prepare(self, profile: ModelProfile, costs: Costs) -> SimulationSetup:
        """The method on one model, at the costs of one world size."""
        if not self.is_dear:
            costs = replace(costs, codec=None)
        return self.build(profile, costs, self.cap_mb)


def parse_method(text: str) -> SimulatedMethod:
    """The method called ``text``, such as ``mg-wfbp``, or ``ddp:8`` with another cap in MiB.

    ``horovod:64:5`` has a cycle of 5 ms too. Raises ConfigError for any other, with the choices.
    """
    name, *numbers = text.split(":")
    known = {method.name: method for method in METHODS}
    if name not in known:
        raise ConfigError(
            f"there is no method {name!r}{known_names(name, [*known, 'all'])}",
            code="unknown-choice",
        )
    method = known[name]
    if not numbers:
        return method
    if not method.takes_cap:
        raise ConfigError(
            f"method {text!r}: {name} has no bucket cap; leave out the number",
            code="setting-without-effect",
        )
    cap_mb = _read_number(numbers[0])
    if not 0 < cap_mb <= 65536:
        raise ConfigError(
            f"method {text!r}: the bucket cap is {cap_mb:g} MiB; it must be above 0 and at "
            "most 65536",
            code="out-of-range",
        )
    method = replace(method, name=text, cap_mb=cap_mb, numbers=f"{cap_mb:g} MiB")
    has_cycle = len(numbers) > 1 or name == "horovod"
    return _with_cycle(method, numbers[1:]) if has_cycle else method


def _with_cycle(method: SimulatedMethod, numbers: Sequence[str]) -> SimulatedMethod:
    cycle_ms = _read_number(numbers[0]) if numbers else _CYCLE_MS
    is_cycle = _LEAST_CYCLE_MS <= cycle_ms <= _MOST_CYCLE_MS
    if method.build is not _horovod or len(numbers) > 1 or not is_cycle:
        raise ConfigError(
            f"method {method.name!r}: after its cap only horovod has a cycle, of "
            f"{_LEAST_CYCLE_MS:g} to {_MOST_CYCLE_MS:g} ms",
            code="out-of-range",
        )
    words = f"{method.numbers}, every {cycle_ms:g} ms"
    return replace(method, build=partial(_horovod, cycle_ms=cycle_ms), numbers=words)


def _read_number(text: str) -> float:
    """The number, or 0 for text that is no number."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def all_reduce_link(costs: Costs) -> LinkModel:
    """An all-reduce: a reduce-scatter and an all-gather, one after the other."""
    halves = (costs.reduce_scatter, costs.all_gather)
    return LinkModel(
        sum(half.alpha_s for half in halves), sum(half.beta_s_per_byte for half in halves)
    )


def _serial(profile: ModelProfile, costs: Costs, cap_mb: float | None) -> SimulationSetup:
    merged = fuse_until(ready_gradients(profile), first_bytes=0, cap_bytes=0)
    return _all_reduces(profile, costs, merged, launch=Launch.BACKPROP_END)


def _wfbp(profile: ModelProfile, costs: Costs, cap_mb: float | None) -> SimulationSetup:
    merged = fuse_until(ready_gradients(profile), first_bytes=0, cap_bytes=0)
    return _all_reduces(profile, costs, merged)


def _ddp(profile: ModelProfile, costs: Costs, cap_mb: float | None) -> SimulationSetup:
    # torch's own rule: one that is given holds for the first bucket as well.
    first_mb, cap_mb = (_FIRST_MB, _CAP_MB) if cap_mb is None else (cap_mb, cap_mb)
    merged = fuse_until(
        ready_gradients(profile), first_bytes=first_mb * MIB, cap_bytes=cap_mb * MIB
    )
    return _all_reduces(profile, costs, merged)


def _horovod(
    profile: ModelProfile, costs: Costs, cap_mb: float | None, *, cycle_ms: float = _CYCLE_MS
) -> SimulationSetup:
    assert cap_mb is not None
    merged = fuse_by_cycle(
        ready_gradients(profile),
        all_reduce_link(costs),
        cap_bytes=cap_mb * MIB,
        cycle_s=cycle_ms / 1e3,
    )
    return _all_reduces(profile, costs, merged)


def _mg_wfbp(profile: ModelProfile, costs: Costs, cap_mb: float | None) -> SimulationSetup:
    arrivals = ready_gradients(profile)
    merged = merge_where_start_up_is_saved(arrivals, all_reduce_link(costs))
    return _all_reduces(profile, costs, merged)


def bytescheduler(
    profile: ModelProfile, costs: Costs, cap_mb: float | None, most_numel: int = _PARTITION_NUMEL
) -> SimulationSetup:
    """Tensors in pieces of ``most_numel`` elements at most, the first layers' first."""
    pieces = partition(profile, most_numel=most_numel)
    names, link = [spec.name for spec in pieces.workload.params()], all_reduce_link(costs)
    order = prioritise(ready_gradients(pieces), names, link, credit_numel=_CREDIT_NUMEL)
    merged = [FusedGradients((spec,), 0.0) for spec in order]
    return _all_reduces(pieces, costs, merged, wait=Wait.FEED_FORWARD)


def _dear_unfused(profile: ModelProfile, costs: Costs, cap_mb: float | None) -> SimulationSetup:
    return _dear_by_cap(profile, costs, 0)


def _dear(profile: ModelProfile, costs: Costs, cap_mb: float | None) -> SimulationSetup:
    model_bytes = sum(spec.nbytes for spec in profile.workload.params())
    config = EngineConfig(bucket_cap_mb=cap_mb)
    cap_bytes = config.cap_bytes(model_bytes, world_size=costs.world_size)
    return _dear_by_cap(profile, costs, cap_bytes)


def _dear_by_cap(profile: ModelProfile, costs: Costs, cap_bytes: int) -> SimulationSetup:
    groups = fuse_by_cap(list(profile.workload.params()), cap_bytes)
    layout = build_layout(groups, costs.world_size)
    return SimulationSetup(profile, layout, Conduct(dear(len(layout)), WINDOW, eager=True), costs)


def _dear_plan(profile: ModelProfile, costs: Costs, cap_mb: float | None) -> SimulationSetup:
    plan = make_plan(profile, costs, world_size=costs.world_size, eager=True)
    layout = plan.layout(profile.workload.params(), costs.world_size)
    return SimulationSetup(profile, layout, plan.conduct, costs)


def _all_reduces(
    profile: ModelProfile,
    costs: Costs,
    merged: Sequence[FusedGradients],
    *,
    launch: Launch = Launch.GRADIENTS_READY,
    wait: Wait = Wait.STEP,
) -> SimulationSetup:
    """All-reduces of ``merged`` in their order; parameters that are not trained lie idle."""
    place = {spec.name: number for number, spec in enumerate(profile.workload.params())}
    moving = sorted(merged, key=lambda one: min(place[spec.name] for spec in one.specs))
    idle = fuse_by_cap([spec for spec in profile.workload.params() if not spec.trained], 2**62)
    layout = build_layout(
        [*(_in_order(one.specs, place) for one in moving), *idle], costs.world_size
    )
    index = {id(one): number for number, one in enumerate(moving)}
    order = (*(index[id(one)] for one in merged), *range(len(moving), len(layout)))
    gathers = tuple(AllGather(bucket, after=bucket) for bucket in order)
    schedule = Schedule("all-reduce", order, gathers, launch, wait)
    return SimulationSetup(
        profile,
        layout,
        Conduct(schedule, window=1, eager=True, gather="gradients"),
        replace(costs, reduce_scatter=all_reduce_link(costs), all_gather=_NOTHING),
        not_before_s=(*(one.start_s for one in moving), *(0.0 for _ in idle)),
    )


def _in_order(specs: Sequence[ParamSpec], place: dict[str, int]) -> list[ParamSpec]:
    return sorted(specs, key=lambda spec: place[spec.name])


METHODS: tuple[SimulatedMethod, ...] = (
    SimulatedMethod(
        "serial", "an all-reduce for each tensor, after backprop", "the plain loop", _serial
    ),
    SimulatedMethod(
        "wfbp",
        "an all-reduce for each tensor, during backprop",
        "Poseidon (Zhang et al., ATC 2017)",
        _wfbp,
    ),
    SimulatedMethod(
        "ddp",
        "buckets that close once they hold so much, all-reduced during backprop",
        "torch.nn.parallel.DistributedDataParallel (Li et al., VLDB 2020)",
        _ddp,
        takes_cap=True,
        numbers=f"{_CAP_MB:g} MiB, the first {_FIRST_MB:g} MiB",
    ),
    SimulatedMethod(
        "horovod",
        "what has become ready since the last cycle is fused up to a size and all-reduced",
        "Horovod's tensor fusion",
        _horovod,
        cap_mb=128.0,
        takes_cap=True,
        numbers="128 MiB, every 1 ms, as it comes since 0.21; before that 64 MiB and 5 ms",
    ),
    SimulatedMethod(
        "mg-wfbp",
        "a bucket waits for the next gradient where that saves start-up",
        "MG-WFBP (Shi, Chu and Li, INFOCOM 2019)",
        _mg_wfbp,
    ),
    SimulatedMethod(
        "bytescheduler",
        "tensors cut into pieces, first layers first, so many elements on their way",
        "ByteScheduler (Peng et al., SOSP 2019)",
        bytescheduler,
        numbers="cut at 8 million, 16 million on their way, as its documents give for all-reduce",
    ),
    SimulatedMethod(
        "dear-unfused",
        "DeAR, a bucket for each tensor",
        "DeAR (Zhang et al., ICDCS 2023)",
        _dear_unfused,
        is_dear=True,
    ),
    SimulatedMethod(
        "dear",
        "DeAR, even buckets up to a cap",
        "DeAR (Zhang et al., ICDCS 2023)",
        _dear,
        takes_cap=True,
        numbers="the cap that the engine has without a plan",
        is_dear=True,
    ),
    SimulatedMethod(
        "dear-plan",
        "uneven buckets and gathers during backprop, as the planner finds them",
        "this package",
        _dear_plan,
        is_dear=True,
    ),
)
