"""Network: what a collective costs at any number of ranks, from a few well-known numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dearmpi.config import CommDtype
from dearmpi.errors import ConfigError
from dearmpi.plan.cost import Costs, ring_cost
from dearmpi.plan.layout import ParamSpec


@dataclass(frozen=True, slots=True)
class Network:
    """Costs at one world size of 2 or more, from which those at any other follow.

    name: what to call it. source: where the numbers are from, in words.
    """

    name: str
    costs: Costs
    source: str

    def at(self, world_size: int) -> Costs:
        """Costs over ``world_size`` ranks, by the rounds and bytes of a ring."""
        return self.costs.at(world_size)

    def sent_as(self, comm_dtype: CommDtype, specs: Iterable[ParamSpec]) -> Network:
        """The same for whoever sends the trained ones of ``specs`` in ``comm_dtype``.

        Raises ConfigError if all are of half precision already.
        """
        costs = self.costs.sent_as(comm_dtype, specs)
        if costs is self.costs:
            return self
        return replace(self, costs=costs, source=f"{self.source}; parameters sent in {comm_dtype}")

    @property
    def bandwidth(self) -> float:
        """Bytes per second of one message, the mean of both operations."""
        halves = (self.costs.reduce_scatter, self.costs.all_gather)
        world_size = self.costs.world_size
        seconds = sum(link.beta_s_per_byte for link in halves) / 2 * world_size / (world_size - 1)
        return math.inf if seconds == 0 else 1 / seconds

    def with_bandwidth(self, bandwidth: float) -> Network:
        """The same latency at another bandwidth, in bytes per second.

        Raises ConfigError for a network on which bytes take no time: they cannot take longer.
        """
        if math.isinf(self.bandwidth):
            raise ConfigError(
                f"network {self.name} takes 0 s per byte, so it has no other bandwidths; give it "
                "a time per byte above 0"
            )
        factor = self.bandwidth / bandwidth
        costs = replace(
            self.costs,
            reduce_scatter=self.costs.reduce_scatter.scaled(alpha=1, beta=factor),
            all_gather=self.costs.all_gather.scaled(alpha=1, beta=factor),
        )
        return replace(self, name=f"{bandwidth * 8e-9:g} Gbit/s", costs=costs)


def link_network(name: str, alpha_s: float, beta_s_per_byte: float, source: str) -> Network:
    """A network of which one message between neighbours takes ``alpha + beta * n`` seconds."""
    ring = ring_cost(alpha_s, beta_s_per_byte, 2)
    return Network(name, Costs(2, ring, ring), source)


# MG-WFBP's code carries fits of an all-reduce over 16 GPUs, one for 10 Gbit/s Ethernet and one for
# 56 Gbit/s InfiniBand; a ring of 16 has 30 rounds. Their slopes are not taken: the Ethernet's is
# below what its wire allows. DeAR's paper gives the line rates, but no fit.
PRESETS = (
    link_network(
        "10GbE",
        9.08e-4 / 30,
        8e-10,
        "10 Gbit/s; 30 us a round, from an all-reduce of 16 GPUs that starts in 0.908 ms (MG-WFBP)",
    ),
    link_network(
        "100GbIB",
        2.36e-4 / 30,
        8e-11,
        "100 Gbit/s; 7.9 us a round, from an all-reduce of 16 GPUs that starts in 0.236 ms over "
        "56 Gbit/s InfiniBand (MG-WFBP)",
    ),
)


def parse_network(text: str) -> Network | None:
    """The preset called ``text``, or a network from ``alpha,beta``; None if it is neither.

    alpha in seconds and beta in seconds per byte, of one message between neighbours. Raises
    ConfigError for numbers that are negative, infinite or none.
    """
    for preset in PRESETS:
        if preset.name.lower() == text.lower():
            return preset
    if "," not in text:
        return None
    try:
        alpha_s, beta_s_per_byte = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"network {text!r}: write alpha,beta in seconds and seconds per byte, such as "
            f"3e-5,8e-10, or one of {', '.join(preset.name for preset in PRESETS)}"
        ) from None
    return link_network(text, alpha_s, beta_s_per_byte, "as given")
