"""Comparison: methods side by side on one model, network and world size.

The paper's setting is five models on 64 GPUs over two networks, with claimed gains. Zhang et al.,
"DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining", ICDCS 2023
(arXiv 2302.12445). Its GPUs are RTX 2080 Ti.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from dearmpi.errors import ConfigError
from dearmpi.plan.data.workload import Workload, read_workload
from dearmpi.plan.model.cost import Costs
from dearmpi.plan.model.network import Network
from dearmpi.plan.model.profile import ModelProfile, profile_workload
from dearmpi.plan.rivals.methods import (
    SimulatedMethod,
    SimulationSetup,
    bytescheduler,
    parse_method,
)
from dearmpi.plan.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True)
class MethodRow:
    """One method's buckets and simulated timeline."""

    method: SimulatedMethod
    num_buckets: int
    timeline: Timeline

    @property
    def iteration_s(self) -> float:
        """Seconds from one backprop to the next."""
        return self.timeline.iteration_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows in the order of the given methods. wire_s: seconds on the wire for all gradients, there
    and back, without start-up.
    """

    profile: ModelProfile
    network: Network
    world_size: int
    rows: tuple[MethodRow, ...]
    wire_s: float

    @property
    def compute_s(self) -> float:
        return self.profile.feed_forward_s + self.profile.backprop_s

    @property
    def bound_s(self) -> float:
        """What no method can beat: computation, or the bytes that every rank must send."""
        return max(self.compute_s, self.wire_s)

    @property
    def best_other(self) -> MethodRow | None:
        """The fastest of the methods that are not DeAR."""
        others = [row for row in self.rows if not row.method.is_dear]
        return min(others, key=lambda row: row.iteration_s, default=None)

    def speed_up(self, row: MethodRow) -> float | None:
        """Of ``row`` over the best of the others; None where there is none."""
        return self.best_other.iteration_s / row.iteration_s if self.best_other else None

    def as_plain(self) -> dict[str, Any]:
        """What is compared, and each method's figures."""
        workload, costs = self.profile.workload, self.network.at(self.world_size)
        grouped = self.network.grouped_at(self.world_size)
        return {
            "workload": workload.name,
            "batch_size": workload.batch_size,
            "world_size": self.world_size,
            "network": {
                "name": self.network.name,
                "source": self.network.source,
                "reduce_scatter": asdict(costs.reduce_scatter),
                "all_gather": asdict(costs.all_gather),
                "topology": self.network.topology,
                "dear": [asdict(grouped.reduce_scatter), asdict(grouped.all_gather)],
            },
            "device": self.profile.device,
            "feed_forward_s": self.profile.feed_forward_s,
            "backprop_s": self.profile.backprop_s,
            "wire_s": self.wire_s,
            "bound_s": self.bound_s,
            "methods": [self._plain_row(row) for row in self.rows],
        }

    def _plain_row(self, row: MethodRow) -> dict[str, Any]:
        return {
            "name": row.method.name,
            "about": row.method.about,
            "numbers": row.method.numbers,
            "source": row.method.source,
            "num_buckets": row.num_buckets,
            "iteration_s": row.iteration_s,
            "exposed_s": row.timeline.exposed_s,
            "over_bound": row.iteration_s / self.bound_s,
            "speed_up": self.speed_up(row),
        }


def compare(
    profile: ModelProfile, network: Network, world_size: int, methods: Iterable[SimulatedMethod]
) -> Comparison:
    """Simulate ``methods`` on ``profile`` over ``world_size`` ranks.

    Raises ConfigError where neither computation nor the wire takes any time.
    """
    costs, grouped = network.at(world_size), network.grouped_at(world_size)
    num_bytes = sum(spec.nbytes for spec in profile.workload.params() if spec.trained)
    wire_s = network.wire_s(world_size, num_bytes)
    if profile.feed_forward_s + profile.backprop_s + wire_s == 0:
        raise ConfigError(
            f"neither computation nor {world_size} rank(s) over {network.name} take any time: "
            "there is nothing to compare; give times above 0",
            code="nothing-to-simulate",
        )
    rows = []
    for method in methods:
        setup = method.prepare(profile, grouped if method.is_dear else costs)
        if method.is_dear and network.rates:  # shared out as these very buckets are
            setup = replace(setup, costs=network.grouped_at(world_size, setup.buffers))
        num_buckets = sum(bucket.trained for bucket in setup.layout)  # frozen ones do not travel
        rows.append(MethodRow(method, num_buckets, setup.run()))
    return Comparison(profile, network, world_size, tuple(rows), wire_s)


MODELS = ("resnet50", "densenet201", "inception_v4", "bert_base", "bert_large")
WORLD_SIZE = 64
CLAIMS = {"10GbE": 0.83, "100GbIB": 0.15}
"""Largest gain over the best of the others, by network (abstract)."""

DEVICE = (
    "RTX 2080 Ti in fp32: ResNet-50 at 294, Inception-v4 at 79 images per second (Lambda, 2019), "
    "the others at ResNet-50's FLOPs per second; backprop twice the feed-forward"
)
_IMAGES_PER_S = {"resnet50": 294.0, "inception_v4": 79.0}
_PASSES = 3  # feed-forward once, backprop as much as two of them
CAPS_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 32.0, 64.0, 128.0, 256.0)
PARTITION_NUMEL = 4_000_000
"""At which the authors cut ByteScheduler's tensors (lzhangbv/dear_pytorch, bytescheduler/)."""
_FUSED = ("ddp", "horovod", "mg-wfbp")


def paper_profile(workload: Workload) -> ModelProfile:
    """``workload``, one of ``MODELS``, with the times that the paper's GPU should take.

    Raises ConfigError for any other.
    """
    if workload.name not in MODELS:
        raise ConfigError(
            f"the times of workload {workload.name} are not known; give --feed-forward-s and "
            "--backprop-s, or a measured --profile",
            code="nothing-to-simulate",
        )
    compute_s = workload.batch_size * _seconds_per_sample(workload)
    profile = profile_workload(
        workload, feed_forward_s=compute_s / _PASSES, backprop_s=compute_s * (1 - 1 / _PASSES)
    )
    return replace(profile, device=DEVICE)


def _seconds_per_sample(workload: Workload) -> float:
    if workload.name in _IMAGES_PER_S:
        return 1 / _IMAGES_PER_S[workload.name]
    known = read_workload("resnet50")
    return _flops(workload) / _flops(known) / _IMAGES_PER_S[known.name]


def _flops(workload: Workload) -> int:
    return sum(layer.flops for layer in workload.layers)


@dataclass(frozen=True, slots=True)
class PaperGain:
    """DeAR against the best of the others, all of them with fusion or all without.

    overlap: the factor that its two pipelines can bring, both without idle time: WFBP's bound over
        DeAR's, for DeAR's own buckets. Never more than ``1 + t_ff / (2 t_bp)``.
    """

    comparison: Comparison
    fused: bool

    @property
    def dear(self) -> MethodRow:
        """The best of DeAR's rows."""
        rows = [row for row in self.comparison.rows if row.method.is_dear]
        return min(rows, key=lambda row: row.iteration_s)

    @property
    def best_other(self) -> MethodRow:
        """The fastest of the others."""
        assert self.comparison.best_other is not None
        return self.comparison.best_other

    @property
    def factor(self) -> float:
        """How many times as fast DeAR is."""
        return self.best_other.iteration_s / self.dear.iteration_s

    @property
    def overlap(self) -> float:
        """WFBP's bound over DeAR's, for DeAR's own buckets."""
        timeline = self.dear.timeline
        both_s = timeline.reduce_s + timeline.gather_s
        wfbp_s = timeline.feed_forward_s + max(timeline.backprop_s, both_s)
        return wfbp_s / timeline.dear_bound_s

    @property
    def most_overlap(self) -> float:
        """What ``overlap`` can be at most, whatever the network: ``1 + t_ff / (2 t_bp)``."""
        timeline = self.dear.timeline
        return 1 + timeline.feed_forward_s / (2 * timeline.backprop_s)

    @property
    def start_up(self) -> float:
        """The loss of the best other method to the start-up of its operations, over DeAR's loss to
        its own.
        """
        return self._lost_to_start_up(self.best_other) / self._lost_to_start_up(self.dear)

    def _lost_to_start_up(self, row: MethodRow) -> float:
        """The time of ``row`` over what it would be if operations started at once."""
        network, costs = self.comparison.network, self.comparison.network.costs
        at_once = replace(
            costs,
            reduce_scatter=costs.reduce_scatter.scaled(alpha=0.0, beta=1.0),
            all_gather=costs.all_gather.scaled(alpha=0.0, beta=1.0),
        )
        free = compare(
            self.comparison.profile,
            replace(network, costs=at_once),
            self.comparison.world_size,
            [row.method],
        )
        return row.iteration_s / free.rows[0].iteration_s

    @property
    def rest(self) -> float:
        """The remaining factor: waits of the best other method for fusion, over what DeAR leaves
        exposed at the ends of both passes.
        """
        return self.factor / self.overlap / self.start_up

    def as_plain(self) -> dict[str, Any]:
        """The comparison, and what follows from it: as factors, 1 for no gain."""
        return {
            **self.comparison.as_plain(),
            "fusion": self.fused,
            "best_other": self.best_other.method.name,
            "best_dear": self.dear.method.name,
            "gain": self.factor,
            "overlap": self.overlap,
            "start_up": self.start_up,
            "rest": self.rest,
            "most_overlap": self.most_overlap,
        }


def paper_gains(network: Network) -> list[PaperGain]:
    """For each model, without and with fusion."""
    return [
        PaperGain(compare(paper_profile(read_workload(model)), network, WORLD_SIZE, methods), fused)
        for model in MODELS
        for fused, methods in ((False, unfused_methods()), (True, fused_methods()))
    ]


def unfused_methods() -> Sequence[SimulatedMethod]:
    """What the paper compares without tensor fusion."""
    cut = partial(bytescheduler, most_numel=PARTITION_NUMEL)
    theirs = replace(
        parse_method("bytescheduler"),
        numbers="cut at 4 million, 16 million on their way, as the paper's authors had them",
        build=cut,
    )
    return [parse_method("wfbp"), theirs, _one_in_flight("dear-unfused")]


def fused_methods() -> Sequence[SimulatedMethod]:
    """What the paper compares with tensor fusion; DeAR's cap is the best of ten, as if searched."""
    caps = [_one_in_flight(f"dear:{cap_mb:g}") for cap_mb in CAPS_MB]
    return [*(parse_method(name) for name in _FUSED), *caps]


def _one_in_flight(name: str) -> SimulatedMethod:
    """The paper's DeAR has one operation of a kind in flight."""
    method = parse_method(name)

    def build(profile: ModelProfile, costs: Costs, cap_mb: float | None) -> SimulationSetup:
        setup = method.build(profile, costs, cap_mb)
        return replace(setup, conduct=replace(setup.conduct, window=1))

    return replace(method, about=f"{method.about}, one operation of a kind in flight", build=build)
