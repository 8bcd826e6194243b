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
from dataclasses import dataclass
from functools import lru_cache

from dearmpi.cuts import Cuts

_LEAST_PIECE_BYTES = 1 << 16  # of a shard in a chunk: below, starts of messages count
_CHUNK_BYTES = 3 << 19  # of the whole buffer in a chunk, which the first dimension carries
_FEWEST, _MOST = 4, 64
_ALIGNED = 16  # elements: sums of aligned pieces take no longer

Line = tuple[tuple[int, int], ...]
"""The stages that cross one dimension, in their order on every rank: (chunk, stage)."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A rank's coordinates are the digits of its place: the inner dimension counts first.

    sizes: ranks in each dimension, from inner to outer, each 2 or more; their product is the number
        of ranks. order: ranks by place, those of a host next to each other.
    orders: in which reduce-scatters of chunks cross the dimensions, by turns; one from inner to
        outer if there is none.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        return "x".join(map(str, self.sizes))

    @property
    def text(self) -> str:
        """What ``topology`` says for this grid: sizes, and after ``@`` the ranks by place."""
        is_numbered = self.order == tuple(range(self.num_ranks))
        return str(self) if is_numbered else f"{self}@{','.join(map(str, self.order))}"

    @property
    def num_ranks(self) -> int:
        """Number of points."""
        return len(self.order)

    def order_of(self, chunk: int) -> tuple[int, ...]:
        """The dimensions as the reduce-scatter of ``chunk`` crosses them."""
        if not self.orders:
            return tuple(range(len(self.sizes)))
        return self.orders[chunk % len(self.orders)]

    def lines(self, num_chunks: int, *, is_gather: bool = False) -> list[Line]:
        """For each dimension, the stages that cross it in one operation.

        Ranks that serve a dimension in different orders can wait for each other. All first stages
        come before all second ones, by chunk: no stage waits for one that comes later here.
        """
        found: list[list[tuple[int, int]]] = [[] for _ in self.sizes]
        for stage in range(len(self.sizes)):
            for chunk in range(num_chunks):
                order = self.order_of(chunk)
                found[order[-1 - stage if is_gather else stage]].append((chunk, stage))
        return [tuple(line) for line in found]

    def crosses_hosts(self, dimension: int, hosts: Sequence[str]) -> bool:
        """Whether ranks of different hosts meet in ``dimension``. ``hosts``: of each rank."""
        stride, size = math.prod(self.sizes[:dimension]), self.sizes[dimension]
        names = [hosts[rank] for rank in self.order]
        return any(
            names[place] != names[place - place // stride % size * stride]
            for place in range(len(names))
        )


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


@lru_cache(maxsize=256)
def stages_of(grid: Grid, rank: int, order: tuple[int, ...]) -> tuple[GridStage, ...]:
    """The stages of ``rank`` in a reduce-scatter that crosses dimensions in ``order``."""
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
