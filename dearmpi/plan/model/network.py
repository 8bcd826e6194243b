"""Network: what a collective costs at any number of ranks, from a few well-known numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dearmpi.config import CommDtype
from dearmpi.errors import ConfigError
from dearmpi.grid import Buffers, grid_text, parts_entering
from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.model.codec_cost import CodecCost
from dearmpi.plan.model.cost import (
    LEAST_WIRE_SHARE,
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


FEWEST_CHUNKS = 4
"""In which a bucket crosses the dimensions of a grid; large ones have more."""


@dataclass(frozen=True, slots=True)
class Levels:
    """The dimensions of a network, from inner to outer.

    costs: of each, where nothing else is under way. hidden: the part of the time of the others that
    passes beside the busiest one. It is 1 where each has a wire of its own, and 0 where all share
    one.
    """

    costs: tuple[Costs, ...]
    hidden: float = 1.0

    def at(
        self, sizes: Sequence[int], rates: Sequence[float] = (), buffers: Buffers = ()
    ) -> tuple[LinkModel, LinkModel]:
        """A reduce-scatter and an all-gather of all ranks, ``sizes`` of which meet in dimensions.

        rates: as in ``Grid``, where chunks cross them in the orders of Themis. buffers: that travel
        in turn, of which the mean counts; a large one if there are none. Raises ConfigError for
        another number of dimensions.
        """
        if len(sizes) != len(self.costs):
            raise ConfigError(
                f"{len(sizes)} dimensions, but the network was measured in {len(self.costs)}; give "
                "as many sizes",
                code="topology-misfit",
            )
        costs = [one.at(size) for one, size in zip(self.costs, sizes, strict=True)]
        reduces = [one.reduce_scatter for one in costs]
        gathers = [one.all_gather for one in costs]
        parts = parts_entering(sizes, rates, buffers)
        return self._pipelined(reduces, parts), self._pipelined(gathers, parts)

    def wire_s(
        self, sizes: Sequence[int], reduced: float, gathered: float, rates: Sequence[float] = ()
    ) -> float:
        """Least seconds for so many bytes reduced and gathered."""
        reduce, gather = self.at(sizes, rates)
        return reduce.wire_s(reduced) + gather.wire_s(gathered)

    def _pipelined(self, links: Sequence[LinkModel], parts: Sequence[float]) -> LinkModel:
        """Chunks cross the dimensions one after the other, and are in several at the same time.

        parts: of a buffer, what enters each. While the busiest works, the others do, except for
        one chunk.
        """
        loads = [part * link.beta_s_per_byte for part, link in zip(parts, links, strict=True)]
        wires = [load * link.wire_share for load, link in zip(loads, links, strict=True)]
        beside = (1 - self.hidden * (1 - 1 / FEWEST_CHUNKS)) * (sum(loads) - max(loads))
        beta = max(loads) + beside
        wire = max(wires) + (1 - self.hidden) * (sum(wires) - max(wires))
        share = min(1.0, max(LEAST_WIRE_SHARE, wire / beta)) if beta else 1.0
        return LinkModel(sum(link.alpha_s for link in links), beta, share)


@dataclass(frozen=True, slots=True)
class Network:
    """Costs at one world size of 2 or more, which determine the costs at any other.

    name: what to call it. source: where the numbers are from, in words. node: where several ranks
        share one; the costs are then between nodes. levels: its dimensions, where they were
        measured. sizes: the ranks in each, where DeAR goes dimension by dimension. rates: of each,
        where it does so by Themis.
    """

    name: str
    costs: Costs
    source: str
    node: Node | None = None
    levels: Levels | None = None
    sizes: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()

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

    def grouped_at(self, world_size: int, buffers: Buffers = ()) -> Costs:
        """The same for DeAR, which goes by the dimensions of ``sizes`` if there are any. buffers:
        as in ``Levels.at``.
        """
        costs = self.at(world_size)
        if not self.sizes or world_size == 1:
            return costs
        reduce_scatter, all_gather = self._levels.at(self.sizes, self.rates, buffers)
        return replace(costs, reduce_scatter=reduce_scatter, all_gather=all_gather)

    @property
    def topology(self) -> str:
        """As DeAR goes: sizes, and after ``/`` rates; or ``flat``."""
        return grid_text(self.sizes, self.rates) or "flat"

    @property
    def _levels(self) -> Levels:
        """As measured; else nodes and what joins them, or the same wire in all dimensions."""
        if self.levels is not None:
            return self.levels
        if self.node is None:
            return Levels((self.costs,) * len(self.sizes), hidden=0.0)
        inside = ring_cost(self.node.alpha_s, self.node.beta_s_per_byte, self.node.num_ranks)
        return Levels((Costs(self.node.num_ranks, inside, inside), self.costs))

    def with_topology(self, text: str, world_size: int) -> Network:
        """The same where DeAR's ranks are grouped as ``text`` says: ``flat``; sizes; or ``hosts``,
        as many ranks to each as were measured, or share a node.

        Raises ConfigError for sizes that do not fit, and where nothing says what a host is.
        """
        if text == "flat":
            return self
        rates: tuple[float, ...] = ()
        if text == "hosts":
            sizes = self._sizes_by_hosts(world_size)
        else:
            named, _, rates_named = text.partition("/")
            sizes = tuple(map(int, named.split("x")))
            rates = tuple(map(float, rates_named.split("x"))) if rates_named else ()
        if math.prod(sizes) != world_size or min(sizes) < 2:
            raise ConfigError(
                f"topology {'x'.join(map(str, sizes))} is of {math.prod(sizes)} ranks, but the "
                f"world size is {world_size}; give sizes of 2 or more whose product is the world "
                "size",
                code="topology-misfit",
            )
        if self.levels is None and self.node is not None and self.node.num_ranks % sizes[0]:
            raise ConfigError(
                f"topology {text} has {sizes[0]} ranks in its inner dimension, but "
                f"{self.node.num_ranks} share a node; give an inner size that divides these",
                code="topology-misfit",
            )
        if rates and self.levels is None:
            raise ConfigError(
                f"topology is {text!r}, but nothing tells what each dimension of {self.name} "
                "costs; give a file of dear-train calibrate --topology, or leave the rates out",
                code="setting-missing",
            )
        found = replace(self, sizes=sizes, rates=rates)
        found = replace(found, name=f"{self.name}, DeAR by {found.topology}")
        found.grouped_at(world_size)  # which looks at the number of dimensions
        return found

    def _sizes_by_hosts(self, world_size: int) -> tuple[int, ...]:
        """As many ranks to each host as were measured, or share a node."""
        inner: tuple[int, ...] = ()
        if self.levels is not None:
            inner = tuple(one.world_size for one in self.levels.costs[:-1])
        elif self.node is not None:
            inner = (self.node.num_ranks,)
        if not inner:
            raise ConfigError(
                f"topology is 'hosts', but nothing tells how many ranks of {self.name} share one; "
                "give --ranks-per-node and --node-network, sizes, or a file of dear-train "
                "calibrate --topology hosts",
                code="setting-missing",
            )
        return (*inner, world_size // math.prod(inner))

    def wire_s(self, world_size: int, num_bytes: float) -> float:
        """Least seconds for ``num_bytes`` reduced and gathered: of the busier link, where a bucket
        may be in the nodes while another is between them.
        """
        within, between = self._links(world_size)
        reduced, gathered = (share * num_bytes for share in self.costs.least_sent)
        least_s = between.reduce_scatter.wire_s(reduced) + between.all_gather.wire_s(gathered)
        if within is not None:
            least_s = max(least_s, within.wire_s(reduced) + within.wire_s(gathered))
        if self.sizes and world_size > 1:
            least_s = min(least_s, self._levels.wire_s(self.sizes, reduced, gathered, self.rates))
        return least_s

    def _links(self, world_size: int) -> tuple[LinkModel | None, Costs]:
        """A ring within a node, if ranks share one, and the costs between nodes."""
        if self.node is None:
            return None, self.costs.at(world_size)
        within = ring_cost(
            self.node.alpha_s, self.node.beta_s_per_byte, min(world_size, self.node.num_ranks)
        )
        return within, self.costs.at(math.ceil(world_size / self.node.num_ranks))

    def describe_last_node(self, world_size: int) -> str:
        """What is simulated where ranks do not fill the last node; empty where they do."""
        if self.node is None or not (left := world_size % self.node.num_ranks):
            return ""
        room = self.node.num_ranks
        if world_size < room:
            return f"all {world_size} ranks are on one node, which has room for {room}"
        return (
            f"{world_size} ranks do not fill nodes of {room}: the last one has {left}, and is "
            "taken to be as slow as a full one. A job with such hosts has no topology but flat"
        )

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
        share, node, levels = share_sent(comm_dtype, specs), self.node, self.levels
        if node is not None:
            node = replace(node, beta_s_per_byte=share * node.beta_s_per_byte)
        if levels is not None:
            costs = (
                one.with_slopes(reduce_scatter=share, all_gather=share) for one in levels.costs
            )
            levels = replace(levels, costs=tuple(costs))
        return replace(
            self,
            costs=self.costs.with_slopes(reduce_scatter=share, all_gather=share),
            source=f"{self.source}; parameters sent in {comm_dtype}",
            node=node,
            levels=levels,
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
