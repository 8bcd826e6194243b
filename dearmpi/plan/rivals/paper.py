"""The paper's setting: five models on 64 GPUs over two networks, and its claimed gains.

Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce
Pipelining", ICDCS 2023 (arXiv 2302.12445). Its GPUs are RTX 2080 Ti.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from dearmpi.plan.rivals.side_by_side import Comparison, MethodRow, compare

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
class Gain:
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


def paper_gains(network: Network) -> list[Gain]:
    """For each model, without and with fusion."""
    return [
        Gain(compare(paper_profile(read_workload(model)), network, WORLD_SIZE, methods), fused)
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
