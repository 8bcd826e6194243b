"""Grid: ranks as the points of a grid, such as hosts by ranks of a host.

Collectives on a grid (``comm``) go dimension by dimension, and what checks their steps (``plan``)
shares this type. A bucket travels in chunks. Chunk i is one range of offsets inside every shard.
So each chunk may cross the dimensions in an order of its own: every rank still ends with its shard.

A reduce-scatter of a chunk has a stage for each dimension. Before it, a rank holds sums of the
shards of all ranks whose coordinates are its own in the dimensions crossed so far. It sends each
rank of its line in the dimension the shards with that rank's coordinate. It keeps those with its
own. An all-gather is the mirror image, in the opposite order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from dearmpi.chunk_orders import DimensionWire, play, schedule
from dearmpi.cuts import Cuts

_LEAST_PIECE_BYTES = 1 << 16  # of a shard in a chunk: below, starts of messages count
_CHUNK_BYTES = 3 << 19  # of the whole buffer in a chunk, which the first dimension carries
_FEWEST, _MOST = 4, 64
_ALIGNED = 16  # elements: sums of aligned pieces take no longer

_LARGEST_RATE = 999.0  # as the setting takes it; memory is no faster than counts

Line = tuple[tuple[int, int], ...]
"""The stages that cross one dimension, in their order on every rank: (chunk, stage)."""


def grid_text(sizes: Sequence[int], rates: Sequence[float] = ()) -> str:
    """``2x4``, or with rates ``2x4/10x5``."""
    text = "x".join(map(str, sizes))
    return f"{text}/{'x'.join(f'{rate:g}' for rate in rates)}" if rates else text


def relative_rates(seconds_per_byte: Sequence[float]) -> tuple[float, ...]:
    """Rates of dimensions in units of the slowest, with as many digits as ``topology`` takes."""
    slowest = max(seconds_per_byte)
    found = [slowest / slope if slope else _LARGEST_RATE for slope in seconds_per_byte]
    return tuple(float(f"{min(rate, _LARGEST_RATE):.3g}") for rate in found)


@dataclass(frozen=True, slots=True)
class Grid:
    """A rank's coordinates are the digits of its place: the inner dimension counts first.

    sizes: ranks in each dimension, from inner to outer, each 2 or more; their product is the number
        of ranks. order: ranks by place, those of a host next to each other.
    orders: in which reduce-scatters of chunks cross the dimensions, by turns; one from inner to
        outer if there is none. rates: what a rank sends in each dimension, which has a wire of its
        own; only their ratios count. Chunks then take the orders of Themis, instead of ``orders``.
    loads: with rates, how long earlier buffers keep each dimension, as ``carried`` finds it. The
        unit is the time of this whole buffer at rate 1.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...] = ()
    rates: tuple[float, ...] = ()
    loads: tuple[float, ...] = ()

    def __str__(self) -> str:
        return grid_text(self.sizes, self.rates)

    @property
    def text(self) -> str:
        """What ``topology`` says for this grid: sizes, after ``/`` rates, and after ``@`` the ranks
        by place.
        """
        is_numbered = self.order == tuple(range(self.num_ranks))
        return str(self) if is_numbered else f"{self}@{','.join(map(str, self.order))}"

    @property
    def num_ranks(self) -> int:
        """Number of points."""
        return len(self.order)

    def orders_for(self, num_chunks: int) -> tuple[tuple[int, ...], ...]:
        """By chunk, the dimensions as its reduce-scatter crosses them."""
        if self.rates:
            return _by_themis(self.sizes, self.rates, self.loads, num_chunks)[0]
        orders = self.orders or (tuple(range(len(self.sizes))),)
        return tuple(orders[chunk % len(orders)] for chunk in range(num_chunks))

    def stages(self, num_chunks: int, *, is_gather: bool = False) -> Line:
        """All stages of one operation, (chunk, stage). None waits for one that comes later.

        By chunk, all first stages before all second ones; by Themis in the order of its simulation,
        of which an all-gather is the mirror image.
        """
        depth = len(self.sizes)
        if not self.rates:
            return tuple((chunk, stage) for stage in range(depth) for chunk in range(num_chunks))
        served = _by_themis(self.sizes, self.rates, self.loads, num_chunks)[1]
        if not is_gather:
            return served
        return tuple((chunk, depth - 1 - stage) for chunk, stage in reversed(served))

    def lines(self, num_chunks: int, *, is_gather: bool = False) -> list[Line]:
        """For each dimension, the stages that cross it in one operation, in their order.

        Ranks that serve a dimension in different orders can wait for each other.
        """
        found: list[list[tuple[int, int]]] = [[] for _ in self.sizes]
        orders = self.orders_for(num_chunks)
        for chunk, stage in self.stages(num_chunks, is_gather=is_gather):
            found[orders[chunk][-1 - stage if is_gather else stage]].append((chunk, stage))
        return [tuple(line) for line in found]

    def crosses_hosts(self, dimension: int, hosts: Sequence[str]) -> bool:
        """Whether ranks of different hosts meet in ``dimension``. ``hosts``: of each rank."""
        stride, size = math.prod(self.sizes[:dimension]), self.sizes[dimension]
        names = [hosts[rank] for rank in self.order]
        return any(
            names[place] != names[place - place // stride % size * stride]
            for place in range(len(names))
        )


LEAST_GAIN = 0.03  # below, the machine's noise would choose


@dataclass(frozen=True, slots=True)
class GridGain:
    """What a grid saves: seconds of a reduce-scatter and an all-gather of ``nbytes`` in turn.

    how: ``measured`` or ``predicted``. grid: its text.
    """

    how: str
    nbytes: int
    grid: str
    grid_s: float
    flat_s: float

    @property
    def is_enough(self) -> bool:
        """Whether the grid takes 3 % less time than flat collectives, or less still."""
        return self.grid_s <= (1 - LEAST_GAIN) * self.flat_s

    def __str__(self) -> str:
        return (
            f"{self.how}: both operations on {self.nbytes / 1e6:.3g} MB take "
            f"{self.grid_s * 1e3:.4g} ms by {self.grid}, and {self.flat_s * 1e3:.4g} ms flat"
        )


@lru_cache(maxsize=1024)  # each bucket has loads of its own
def _by_themis(
    sizes: tuple[int, ...], rates: tuple[float, ...], loads: tuple[float, ...], num_chunks: int
) -> tuple[tuple[tuple[int, ...], ...], Line]:
    """Of a reduce-scatter: the order of each chunk, and its stages in the order of service.

    Smallest first, but with slack: where a line held a stage just as its chunk is due, each delay
    of one dimension would let another one idle.
    """
    wires = [DimensionWire(size, rate) for size, rate in zip(sizes, rates, strict=True)]
    loads_s = [load * num_chunks for load in loads]
    chunks = schedule(
        wires, float(num_chunks), is_even=True, num_chunks=num_chunks, loads_s=loads_s
    )
    reduces = [chunk[: len(sizes)] for chunk in chunks]
    # A chunk reaches the next dimension later by as much as it takes in this one.
    slack = [replace(wire, latency_s=wire.transfer_s(1.0)) for wire in wires]
    _, served = play(slack, reduces, is_smallest_first=True)
    return tuple(tuple(one.dimension for one in chunk) for chunk in reduces), tuple(served)


Buffers = Sequence[tuple[Cuts, int]]
"""In the order in which they travel: where each is cut, and the bytes of an element on the wire."""


def carried(grid: Grid, buffers: Buffers) -> list[Grid]:
    """``grid`` for each of ``buffers``, with the loads that the ones before it leave.

    So buffers even out one another, where each has too few chunks to do so by itself. What they
    leave follows from sizes alone, never from timing: all ranks find the same, in every step.
    Without rates all are ``grid``.
    """
    found, loads = list[Grid](), [0.0] * len(grid.sizes)
    for cuts, element_size in buffers:
        nbytes = cuts.total * element_size
        if not grid.rates or not nbytes:
            found.append(grid)
            continue
        own = replace(grid, loads=tuple(load / nbytes for load in loads))
        parts = _parts(own, num_chunks(cuts, element_size))
        for number, part in enumerate(parts):
            wire = DimensionWire(grid.sizes[number], grid.rates[number])
            loads[number] += 2 * wire.transfer_s(part * nbytes)
        loads = [load - min(loads) for load in loads]
        found.append(own)
    return found


def parts_entering(
    sizes: Sequence[int], rates: Sequence[float] = (), buffers: Buffers = ()
) -> list[float]:
    """Of ``buffers`` together, what enters each dimension of ``sizes``: all of it enters the inner
    one, of which a P-th is left for the next; with ``rates`` as Themis shares it out. Of a large
    one if there are none.
    """
    if not rates:
        return [1 / math.prod(sizes[:number]) for number in range(len(sizes))]
    grid = Grid(tuple(sizes), tuple(range(math.prod(sizes))), rates=tuple(rates))
    total = sum(cuts.total * element_size for cuts, element_size in buffers)
    if not total:
        return _parts(grid, _MOST)
    found = [0.0] * len(sizes)
    for (cuts, element_size), own in zip(buffers, carried(grid, buffers), strict=True):
        share = cuts.total * element_size / total
        for number, part in enumerate(_parts(own, num_chunks(cuts, element_size))):
            found[number] += share * part
    return found


def _parts(grid: Grid, num_chunks: int) -> list[float]:
    """Of one buffer."""
    found = [0.0] * len(grid.sizes)
    for order in grid.orders_for(num_chunks):
        left = 1 / num_chunks
        for dimension in order:
            found[dimension] += left
            left /= grid.sizes[dimension]
    return found


@dataclass(frozen=True, slots=True)
class Peer:
    """Another rank of a line. shards: those with that rank's coordinate, by rank."""

    rank: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GridStage:
    """One rank's part in the crossing of a dimension.

    before: ranks as they come round the line backwards, after: forwards, each without this one.
    kept: the shards with the own coordinate. A reduce-scatter receives them, and sends each peer
    its shards; an all-gather sends them, and receives each peer's.
    """

    dimension: int
    before: tuple[Peer, ...]
    after: tuple[Peer, ...]
    kept: tuple[int, ...]


def stages_of(grid: Grid, rank: int, order: tuple[int, ...]) -> tuple[GridStage, ...]:
    """The stages of ``rank`` in a reduce-scatter that crosses dimensions in ``order``."""
    return _stages_of(Grid(grid.sizes, grid.order), rank, order)


@lru_cache(maxsize=256)
def _stages_of(grid: Grid, rank: int, order: tuple[int, ...]) -> tuple[GridStage, ...]:
    place, open_places = grid.order.index(rank), list(range(grid.num_ranks))
    found = []
    for dimension in order:
        stride, size = math.prod(grid.sizes[:dimension]), grid.sizes[dimension]
        own = place // stride % size
        shards: list[list[int]] = [[] for _ in range(size)]
        for other in open_places:
            shards[other // stride % size].append(other)
        peers = []
        for distance in range(1, size):
            at = (own + distance) % size
            peers.append(Peer(grid.order[place + (at - own) * stride], _ranks(grid, shards[at])))
        found.append(
            GridStage(dimension, tuple(peers[::-1]), tuple(peers), _ranks(grid, shards[own]))
        )
        open_places = shards[own]
    return tuple(found)


def _ranks(grid: Grid, places: Sequence[int]) -> tuple[int, ...]:
    return tuple(grid.order[place] for place in places)


def num_chunks(cuts: Cuts, element_size: int) -> int:
    """In how many chunks a buffer travels; ``element_size``: in bytes, on the wire."""
    by_pieces = cuts.largest * element_size // _LEAST_PIECE_BYTES
    wanted = max(_FEWEST, cuts.total * element_size // _CHUNK_BYTES)
    return max(1, min(by_pieces, wanted, _MOST))


def piece(cuts: Cuts, rank: int, chunk: int, num_chunks: int) -> slice:
    """The elements of ``chunk`` in the shard of ``rank``; there may be none."""
    first, last = cuts.range_of(rank)
    return slice(
        first + _offset(last - first, chunk, num_chunks),
        first + _offset(last - first, chunk + 1, num_chunks),
    )


def _offset(numel: int, chunk: int, num_chunks: int) -> int:
    if chunk == num_chunks:
        return numel
    return numel * chunk // num_chunks // _ALIGNED * _ALIGNED
