"""Sparse codecs by magnitude: the largest elements of a gradient, or its heaviest blocks.

Every shard of a bucket sends equally many, so that all messages have one length and each owner gets
what it adds. A reduce-scatter of them is therefore as one of whole buckets: it hides behind
backprop, and needs no all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.algorithms.scratch import Scratch
from dearmpi.comm.api.collectives import Collectives, Request
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.codec.residual import ErrorFeedback
from dearmpi.engine.codec.sparse import FAR_APART, Segment, Selector, SparseReduce

_PIECE = 1 << 16  # elements at once: their magnitudes stay in a core's cache
ALIGNMENT = 64  # bytes
INDEX_BYTES = 4
_MOST_CANDIDATES = 6  # times those wanted; beyond, a threshold is looked for anew
_LOWERED = 0.85  # of the last step's threshold, so that enough elements lie above it
_NUM_SIZES, _LARGEST_SIZE = 64, 24  # powers of two by which magnitudes are counted
COUNTS_BYTES = 4 * _NUM_SIZES
_COUNTED = 1 << 16  # elements of a sample, about
_SAMPLE, _HITS = 4096, 64  # elements of a sample at least, and how many above its threshold
BLOCK = 1024  # elements at most
_NUM_PROJECTIONS = 2


class LargestElements(Selector):
    """The largest magnitudes."""

    def __init__(self, index: int, shards: Sequence[Sequence[Segment]]) -> None:
        super().__init__(index, shards)
        self._thresholds: dict[tuple[int, int, int], float] = {}

    def resize(self, num: int) -> None:
        """Choose ``num`` of each segment from now on."""
        self.shards = [[replace(one, num=num) for one in shard] for shard in self.shards]
        self.num = num

    def choose_in(
        self, values: Tensor, segment: Segment, key: tuple[int, int, int], turn: int
    ) -> Tensor:
        """As ``largest`` does."""
        places, least = largest(values, segment.num, self._thresholds.get(key, 0.0))
        self._thresholds[key] = _LOWERED * least
        return places


class HeaviestBlocks(Selector):
    """The blocks of the largest norms, of one length everywhere."""

    def __init__(self, index: int, shards: Sequence[Sequence[Segment]]) -> None:
        self.block = block_length(shards)
        self._length = max(one.stop for shard in shards for one in shard)
        in_blocks = [[replace(one, num=self._share(one)) for one in shard] for shard in shards]
        super().__init__(index, in_blocks)

    def choose(self, row: Tensor, shard: int, *, rank: int, turn: int) -> Tensor:
        """A segment shorter than a block is sent with what lies beside it."""
        chosen = super().choose(row, shard, rank=rank, turn=turn)
        return chosen.clamp_(max=self._length - self.block).sort().values

    def choose_in(
        self, values: Tensor, segment: Segment, key: tuple[int, int, int], turn: int
    ) -> Tensor:
        """The last block reaches back over the one before where the length asks for it."""
        padding = self._num_in(segment) * self.block - len(values)
        blocks = torch.nn.functional.pad(values, (0, padding)).view(-1, self.block)
        chosen = blocks.square().sum(1).topk(segment.num).indices.sort().values
        return (chosen * self.block).clamp_(max=max(0, len(values) - self.block))

    def _share(self, segment: Segment) -> int:
        return min(-(-segment.num // self.block), self._num_in(segment))

    def _num_in(self, segment: Segment) -> int:
        return -(-(segment.stop - segment.start) // self.block)


def largest(row: Tensor, num: int, threshold: float = 0.0) -> tuple[Tensor, float]:
    """The places of the ``num`` largest magnitudes, ascending, and the least of them.

    row: 1-D and finite; of equal magnitudes the first count. threshold: a little below that of the
    last step, which saves most of the work; it changes nothing else.
    """
    if num == len(row):
        return torch.arange(num, device="cpu"), 0.0
    places = above(row, threshold)
    if not num <= len(places) <= _MOST_CANDIDATES * num:
        places = above(row, _estimate(row, num))
        if len(places) < num:
            places = above(row, 0.0)
    if len(places) < num:  # there are no others
        zeros = (row == 0).nonzero().view(-1)[: num - len(places)]
        return torch.cat([places, zeros]).sort().values, 0.0
    magnitudes = row[places].abs_()
    least = magnitudes.topk(num, sorted=False).values.min()
    chosen = magnitudes > least
    ties = (magnitudes == least).nonzero().view(-1)
    chosen[ties[: num - int(chosen.sum())]] = True
    return places[chosen], float(least)


def above(row: Tensor, threshold: float) -> Tensor:
    """The places of all magnitudes above ``threshold``, ascending."""
    magnitudes = row.new_empty(min(_PIECE, len(row)))
    found = []
    for start in range(0, len(row), _PIECE):
        piece = row[start : start + _PIECE]
        flags = torch.abs(piece, out=magnitudes[: len(piece)]) > threshold
        found.append(torch.from_numpy(flags.numpy().nonzero()[0]).add_(start))
    return torch.cat(found)


def _estimate(row: Tensor, num: int) -> float:
    """A threshold that half as many again as ``num`` magnitudes exceed, by a sample."""
    size = min(len(row), max(_SAMPLE, _HITS * len(row) // num))
    sample = row[:: len(row) // size].abs()
    wanted = min(len(sample), math.ceil(1.5 * num / len(row) * len(sample)))
    return float(sample.topk(wanted, sorted=False).values.min())


def count_magnitudes(values: Tensor, *, finite: bool) -> Tensor:
    """How many elements of ``values`` have which exponent, about: by a sample, ascending, fp32.

    None have any where not all are ``finite``.
    """
    if not finite:
        return torch.zeros(_NUM_SIZES, device="cpu")
    stride = len(values) // _COUNTED | 1  # odd: else it may meet the same column in each row
    sample = values[::stride]
    exponents = torch.frexp(sample).exponent.add_(_NUM_SIZES - _LARGEST_SIZE)
    exponents[sample == 0] = 0
    sizes = exponents.clamp_(0, _NUM_SIZES - 1).long()
    return torch.bincount(sizes, minlength=_NUM_SIZES).float().mul_(len(values) / len(sample))


class ModelShares:
    """How many elements of each bucket's shards are sent, where they are to be the largest of the
    whole model.

    Buckets travel as gradients come, the first while others have none yet. So the counts of all
    buckets' magnitudes in the step before decide, which travel with the elements: all ranks know
    the same ones at the start of a step, and the length of every message. All buckets together
    send the usual number, or fewer. A bucket sends one element of each shard at least.
    """

    def __init__(self) -> None:
        self._usual: dict[int, int] = {}
        self._most: dict[int, int] = {}
        self._counts: dict[int, Tensor] = {}
        self._now: dict[int, int] = {}
        self._step = -1

    def add(self, index: int, *, usual: int, most: int) -> None:
        """Of a shard of bucket ``index``: how many are usual, and how many there are."""
        self._usual[index], self._most[index] = usual, most

    def of(self, index: int, step: int) -> int:
        """How many ``step`` sends; all that came before it is complete where it begins."""
        if step != self._step:
            self._step, self._now = step, self._share_out()
        return self._now.get(index, self._usual[index])

    def note(self, index: int, counts: Tensor) -> None:
        """The mean over ranks and shards of how many magnitudes there are of each size."""
        self._counts[index] = counts

    def reset(self) -> None:
        """Until all buckets have been counted anew, shares are the usual ones."""
        self._counts.clear()
        self._now = {}

    def _share_out(self) -> dict[int, int]:
        """By bucket; none before all have been counted."""
        if self._counts.keys() != self._usual.keys():
            return {}
        counts = {index: self._counts[index] for index in sorted(self._counts)}
        above = torch.stack(list(counts.values())).double().flip(1).cumsum(1)
        totals, wanted = above.sum(0), sum(self._usual.values()) - len(counts)
        size = int(torch.searchsorted(totals, float(wanted)))
        if size == _NUM_SIZES or totals[-1] == 0:
            return {}
        before = above[:, size - 1] if size else torch.zeros(len(counts), dtype=torch.float64)
        part = (wanted - before.sum()) / (totals[size] - before.sum())
        shares = before + part * (above[:, size] - before)
        return {
            index: min(self._most[index], 1 + int(share))
            for index, share in zip(counts, shares.tolist(), strict=True)
        }


class TopBlocks(SparseReduce):
    """The blocks of each shard whose sum over the ranks is heaviest, the same on all ranks.

    The owner of a shard alone chooses, by random projections of all blocks, which arrive as sums:
    so what cancels between ranks is not sent, and one index serves a whole block (ARC-Top-K, arXiv
    2510.26709). Two small collectives go before that of the blocks.
    """

    def __init__(
        self,
        bucket: BucketRuntime,
        algorithms: CollectiveAlgorithms,
        scratch: Scratch,
        *,
        density: float,
        feedback: ErrorFeedback,
        shards: Sequence[Sequence[Segment]],
    ) -> None:
        """As ``SparseReduce``. ``shards``: of what a share is sent, by shard."""
        super().__init__(bucket, algorithms, scratch, density=density, feedback=feedback)
        spec, width = bucket.spec, bucket.spec.itemsize
        self._block = block_length(shards)
        self._shards = [[self._cut(one) for one in shard] for shard in shards]
        num_blocks, self._num_chosen = (
            max(1, *(sum(getattr(one, of) for one in shard) for shard in self._shards))
            for of in ("num_blocks", "num_chosen")
        )
        self._starts = torch.zeros(spec.world_size, num_blocks, dtype=torch.int64, device="cpu")
        for row, shard in zip(self._starts, self._shards, strict=True):
            starts = torch.cat([one.starts for one in shard] or [row[:1]])
            row[: len(starts)] = starts
        each = num_blocks * _NUM_PROJECTIONS * width
        each += self._num_chosen * (INDEX_BYTES + self._block * width) + self.num_flags * width
        self.sparse_bytes = (spec.world_size - 1) * each

    def _cut(self, segment: Segment) -> _Blocks:
        """A last block reaches back over the one before; one longer than its segment has of what
        lies beside it.
        """
        starts = torch.arange(segment.start, segment.stop, self._block, device="cpu")
        starts.clamp_(max=max(segment.start, segment.stop - self._block))
        starts.clamp_(max=self.numel - self._block)
        return _Blocks(starts, min(-(-segment.num // self._block), len(starts)))

    def reduce(
        self, rows: Tensor, collectives: Collectives, *, finite: bool
    ) -> Generator[Request, None, float]:
        """Reduce the projections, gather the owners' choices, reduce the blocks chosen."""
        size, own = len(rows), collectives.rank
        to_choices, to_blocks = collectives.reserve(), collectives.reserve()
        projected = self._project(rows)
        if not finite:
            projected.fill_(math.nan)
        yield self.algorithm.start_reduce_scatter(projected.view(-1), collectives)
        choices = torch.empty(size, self._num_chosen, dtype=torch.int32, device="cpu")
        choices[own] = self._choose(projected[own].square().sum(1), self._shards[own])
        with to_choices:
            request = collectives.start_all_gather(choices.view(-1), "ring")
        yield request
        firsts = self._starts.gather(1, choices.long())[..., None]
        places = (firsts + torch.arange(self._block, device="cpu")).view(size, -1)
        return (
            yield from self.add_up(rows, places, collectives, finite=finite, reserved=to_blocks)
        )

    def _choose(self, weights: Tensor, shard: Sequence[_Blocks]) -> Tensor:
        """The heaviest blocks of each segment; a shard that has fewer repeats the last."""
        first, parts = 0, []
        for one in shard:
            own = weights[first : first + one.num_blocks].topk(one.num_chosen).indices
            parts.append(own.sort().values + first)
            first += one.num_blocks
        chosen = torch.cat(parts or [torch.zeros(1, dtype=torch.int64, device="cpu")])
        return torch.cat([chosen, chosen[-1:].expand(self._num_chosen - len(chosen))])

    def _project(self, rows: Tensor) -> Tensor:
        """Of each block of each shard a few sums, each with random weights."""
        generator = torch.Generator().manual_seed(self.index * FAR_APART + self.turn)
        shape = (self._block, _NUM_PROJECTIONS)
        weights = torch.randn(shape, generator=generator, dtype=rows.dtype, device="cpu")
        projected = rows.new_zeros(len(rows), self._starts.shape[1], _NUM_PROJECTIONS)
        for row, sums, shard in zip(rows, projected, self._shards, strict=True):
            first = 0
            for one in shard:
                self._project_segment(row, one, weights, sums[first : first + one.num_blocks])
                first += one.num_blocks
        return projected

    def _project_segment(self, row: Tensor, one: _Blocks, weights: Tensor, sums: Tensor) -> None:
        start, last = int(one.starts[0]), int(one.starts[-1])
        num_whole = (last - start) // self._block + 1
        whole = row[start : start + num_whole * self._block].view(num_whole, -1)
        torch.mm(whole, weights, out=sums[:num_whole])
        if num_whole < len(sums):
            sums[-1] = row[last : last + self._block] @ weights


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Of a segment: where its blocks start, and how many are sent."""

    starts: Tensor
    num_chosen: int

    @property
    def num_blocks(self) -> int:
        return len(self.starts)


def block_length(shards: Sequence[Sequence[Segment]]) -> int:
    """Elements of a block: of the mean share of a segment, in as many as are of ``BLOCK`` at most;
    so that segments, which send one at least, send twice their shares at most.
    """
    shares = [one.num for shard in shards for one in shard]
    mean = math.ceil(sum(shares) / len(shares))
    return math.ceil(mean / math.ceil(mean / BLOCK))
