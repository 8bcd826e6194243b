"""Comparison: methods side by side on one model, network and world size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from dearmpi.errors import ConfigError
from dearmpi.plan.model.network import Network
from dearmpi.plan.model.profile import ModelProfile
from dearmpi.plan.rivals.methods import SimulatedMethod
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
        return {
            "workload": workload.name,
            "batch_size": workload.batch_size,
            "world_size": self.world_size,
            "network": {
                "name": self.network.name,
                "source": self.network.source,
                "reduce_scatter": asdict(costs.reduce_scatter),
                "all_gather": asdict(costs.all_gather),
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
    costs = network.at(world_size)
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
        setup = method.prepare(profile, costs)
        num_buckets = sum(bucket.trained for bucket in setup.layout)  # frozen ones do not travel
        rows.append(MethodRow(method, num_buckets, setup.run()))
    return Comparison(profile, network, world_size, tuple(rows), wire_s)
