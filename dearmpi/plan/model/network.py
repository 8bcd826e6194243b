"""Network: what a collective costs at any number of ranks, from a few well-known numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dearmpi.config import CommDtype
from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.model.codec_cost import CodecCost
from dearmpi.plan.model.cost import (
    MOST_S,
    Costs,
    LinkModel,
    one_after_another,
    ring_cost,
    share_sent,
)


@dataclass(frozen=True, slots=True)
class Node:
    """What joins the ranks of one node: a message between two takes ``alpha + beta * n`` s.

    name: what to call that.
    """

    name: str
    num_ranks: int
    alpha_s: float
    beta_s_per_byte: float


@dataclass(frozen=True, slots=True)
class Network:
    """Costs at one world size of 2 or more, which determine the costs at any other.

    name: what to call it. source: where the numbers are from, in words. node: where several ranks
        share one; the costs are then between nodes.
    """

    name: str
    costs: Costs
    source: str
    node: Node | None = None

    def at(self, world_size: int) -> Costs:
        """Costs over ``world_size`` ranks, by the rounds and bytes of a ring.

        With nodes there is a ring in each, and then one between nodes for each of its ranks. Those
        share the node's link, which carries ``(N - 1) / N * n`` bytes for N nodes, however many
        ranks are behind it. The last node may have fewer.
        """
        within, between = self._links(world_size)
        if within is None:
            return between
        return replace(
            between,
            world_size=world_size,
            reduce_scatter=one_after_another(within, between.reduce_scatter),
            all_gather=one_after_another(within, between.all_gather),
        )

    def wire_s(self, world_size: int, num_bytes: float) -> float:
        """Least seconds for ``num_bytes`` reduced and gathered: of the busier link, where a bucket
        may be in the nodes while another is between them.
        """
        within, between = self._links(world_size)
        reduced, gathered = (share * num_bytes for share in self.costs.least_sent)
        outside_s = between.reduce_scatter.wire_s(reduced) + between.all_gather.wire_s(gathered)
        if within is None:
            return outside_s
        return max(outside_s, within.wire_s(reduced) + within.wire_s(gathered))

    def _links(self, world_size: int) -> tuple[LinkModel | None, Costs]:
        """A ring within a node, if ranks share one, and the costs between nodes."""
        if self.node is None:
            return None, self.costs.at(world_size)
        within = ring_cost(
            self.node.alpha_s, self.node.beta_s_per_byte, min(world_size, self.node.num_ranks)
        )
        return within, self.costs.at(math.ceil(world_size / self.node.num_ranks))

    def with_node(self, node: Node) -> Network:
        """The same between nodes like ``node``."""
        name = f"{self.name}, nodes of {node.num_ranks} ranks over {node.name}"
        return replace(self, name=name, node=node)

    def sent_as(self, comm_dtype: CommDtype, specs: Iterable[ParamSpec]) -> Network:
        """The same where the trained ones of ``specs`` are sent in ``comm_dtype``.

        Raises ConfigError if all are of half precision already.
        """
        if comm_dtype == "fp32":
            return self
        share, node = share_sent(comm_dtype, specs), self.node
        if node is not None:
            node = replace(node, beta_s_per_byte=share * node.beta_s_per_byte)
        return replace(
            self,
            costs=self.costs.with_slopes(reduce_scatter=share, all_gather=share),
            source=f"{self.source}; parameters sent in {comm_dtype}",
            node=node,
        )

    def compressed(self, codec: CodecCost | None) -> Network:
        """The same where DeAR compresses large buckets; None: where nothing does."""
        if codec is None:
            return self
        computes = codec.reduce_s_per_byte + codec.gather_s_per_byte > 0
        words = f"DeAR with compress {codec.about}"
        words += "" if computes else ", whose computation is taken to cost nothing"
        costs = replace(self.costs, codec=codec)
        return replace(self, costs=costs, source=f"{self.source}; {words}")

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
                "a time per byte above 0",
                code="out-of-range",
            )
        factor = self.bandwidth / bandwidth
        costs = replace(
            self.costs,
            reduce_scatter=self.costs.reduce_scatter.scaled(alpha=1, beta=factor),
            all_gather=self.costs.all_gather.scaled(alpha=1, beta=factor),
        )
        return replace(self, name=f"{bandwidth * 8e-9:g} Gbit/s", costs=costs)


def link_network(name: str, alpha_s: float, beta_s_per_byte: float, source: str) -> Network:
    """A network where one message between neighbours takes ``alpha + beta * n`` seconds."""
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


def parse_node(text: str, num_ranks: int) -> Node:
    """A node of ``num_ranks``, joined by ``alpha,beta`` or a preset.

    Raises ConfigError for anything else.
    """
    link = parse_network(text)
    if link is None or num_ranks < 2:
        raise ConfigError(
            f"nodes of {num_ranks} ranks over {text!r}: 2 ranks or more share a node, over "
            f"alpha,beta or one of {', '.join(preset.name for preset in PRESETS)}",
            code="malformed-value",
        )
    ring = link.costs.all_gather  # of two ranks: one round, with half of the bytes
    return Node(link.name, num_ranks, ring.alpha_s, 2 * ring.beta_s_per_byte)


def parse_network(text: str) -> Network | None:
    """The preset called ``text``, or a network from ``alpha,beta``; None if it is neither.

    alpha in seconds and beta in seconds per byte, of one message between neighbours. Raises
    ConfigError for numbers that are negative, of more than ``MOST_S``, or none.
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
            f"3e-5,8e-10, or one of {', '.join(preset.name for preset in PRESETS)}",
            code="malformed-value",
        ) from None
    if not all(0 <= number <= MOST_S for number in (alpha_s, beta_s_per_byte)):
        raise ConfigError(
            f"network {text!r}: alpha and beta, in seconds and seconds per byte, must be 0 or "
            f"more, and {MOST_S:g} at most",
            code="out-of-range",
        )
    return link_network(text, alpha_s, beta_s_per_byte, "as given")
