"""Cuts: where a flat buffer is cut into shards, one for each rank.

A bucket's layout (``plan``) and the collectives on its buffer (``comm``) share this type.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Cuts:
    """Shard boundaries: rank r owns elements ``offsets[r]`` to ``offsets[r + 1]``.

    offsets: P + 1 indices that never decrease, from 0 to the length of the buffer. Even cuts are a
    ``range``, which takes no memory however many ranks there are. A shard may be empty.
    """

    offsets: Sequence[int]

    @property
    def num_ranks(self) -> int:
        """Number of shards."""
        return len(self.offsets) - 1

    @property
    def is_even(self) -> bool:
        """Whether all shards have one length, which is not 0."""
        return isinstance(self.offsets, range)

    @property
    def total(self) -> int:
        """Elements of the buffer, padding included."""
        return self.offsets[-1]

    @property
    def largest(self) -> int:
        """Elements of the largest shard."""
        if isinstance(self.offsets, range):
            return self.offsets.step
        return max(self.size_of(rank) for rank in range(self.num_ranks))

    def size_of(self, rank: int) -> int:
        """Elements that ``rank`` owns."""
        return self.offsets[rank + 1] - self.offsets[rank]

    def range_of(self, rank: int) -> tuple[int, int]:
        """Elements that ``rank`` owns: (start, stop)."""
        return self.offsets[rank], self.offsets[rank + 1]

    def slice_of(self, rank: int) -> slice:
        """Elements that ``rank`` owns, as an index of the buffer."""
        return slice(self.offsets[rank], self.offsets[rank + 1])

    def owners(self, start: int, stop: int) -> range:
        """Ranks that own elements from ``start`` to ``stop``; those of empty shards may be among
        them. ``start`` is below ``stop``.
        """
        return range(bisect_right(self.offsets, start) - 1, bisect_left(self.offsets, stop))


@lru_cache(maxsize=1024)  # each collective call makes them, on buffers of a few lengths
def even_cuts(numel: int, num_ranks: int) -> Cuts:
    """Equal shards of ``numel`` elements or a few more, so that the number of ranks divides them.

    numel: 0 or more. num_ranks: 1 or more.
    """
    shard = -(-numel // num_ranks)
    if not shard:
        return Cuts((0,) * (num_ranks + 1))
    return Cuts(range(0, shard * num_ranks + 1, shard))


_ALIGNED = 16  # elements: sums of aligned shards take no longer


def weighted_cuts(numel: int, weights: Sequence[float]) -> Cuts:
    """Shards of ``numel`` elements in proportion to ``weights``, up to a few elements and without
    padding; those of weight 0 are empty.

    weights: one for each rank, 0 or more, and not all of them 0.
    """
    sums = list(accumulate(weights))
    offsets = [0]
    for reached in sums:
        place = round(numel * (reached / sums[-1]) / _ALIGNED) * _ALIGNED
        offsets.append(numel if reached == sums[-1] else min(place, numel))
    return Cuts(tuple(offsets))


def balanced_cuts(numel: int, num_ranks: int) -> Cuts:
    """Shards of ``numel`` elements without padding, whose lengths differ by one at most."""
    return Cuts(tuple(numel * rank // num_ranks for rank in range(num_ranks + 1)))
