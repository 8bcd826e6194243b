"""Sparse codecs by magnitude: the largest elements of a gradient, or its heaviest blocks.

Every shard of a bucket sends equally many, so that all messages have one length and each owner gets
what it adds. A reduce-scatter of them is therefore as one of whole buckets: it hides behind
backprop, and needs no all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.algorithms.scratch import Scratch
from dearmpi.comm.api.collectives import Collectives, Request
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.codec.residual import ErrorFeedback
from dearmpi.engine.codec.sparse import FAR_APART, Segment, SparseReduce

_PIECE = 1 << 16  # elements at once: their magnitudes stay in a core's cache
ALIGNMENT = 64  # bytes
INDEX_BYTES = 4
_MOST_CANDIDATES = 6  # times those wanted; beyond, a threshold is looked for anew
LOWERED = 0.85  # of the last step's threshold, so that enough elements lie above it
_NUM_SIZES, _LARGEST_SIZE = 64, 24  # powers of two by which magnitudes are counted
COUNTS_BYTES = 4 * _NUM_SIZES
_COUNTED = 1 << 16  # elements of a sample, about
_SAMPLE, _HITS = 4096, 64  # elements of a sample at least, and how many above its threshold
BLOCK = 1024  # elements at most
_NUM_PROJECTIONS = 2


class TopElements(SparseReduce):
    """The largest elements of each shard, of each rank its own.

    Own coordinates suit a reduce-scatter: an owner adds what arrives wherever it lies, while one
    choice for all would cost an exchange before. Every rank sends each owner as many values and
    indexes.
    """

    def __init__(
        self,
        bucket: BucketRuntime,
        algorithms: CollectiveAlgorithms,
        scratch: Scratch,
        *,
        density: float,
        feedback: ErrorFeedback,
        shares: ModelShares | None = None,
    ) -> None:
        """As ``SparseReduce``. ``shares``: by which a step's number of elements goes; None: by
        ``density`` alone.
        """
        super().__init__(bucket, algorithms, scratch, density=density, feedback=feedback)
        spec = bucket.spec
        self._thresholds = [0.0] * spec.world_size
        self._shares = shares
        if shares is not None:
            shares.add(self.index, usual=self.num_sent, most=self.numel)
        self._lay_out(self.num_sent, spec.itemsize)
        self._steady_bytes = self.sparse_bytes

    def _lay_out(self, num: int, itemsize: int) -> None:
        """A message of ``num`` elements: values, flags, their places, and magnitudes by size."""
        self.num_sent, self._num_values = num, num + self.num_flags
        self._counted_at = self._num_values * itemsize + num * INDEX_BYTES
        unaligned = self._counted_at + (0 if self._shares is None else COUNTS_BYTES)
        self._num_bytes = -(-unaligned // ALIGNMENT) * ALIGNMENT
        self.sparse_bytes = (self._size - 1) * self._num_bytes

    @property
    def steady_bytes(self) -> int:
        """Of a bucket whose share of the model's largest is the usual one."""
        return self._steady_bytes

    def start(self, bucket: BucketRuntime, collectives: Collectives, step: int) -> Request:
        """Learn how many elements are sent in this step."""
        if self._shares is not None:
            self._lay_out(self._shares.of(self.index, step), bucket.spec.itemsize)
        return super().start(bucket, collectives, step)

    def reduce(
        self, rows: Tensor, collectives: Collectives, *, finite: bool
    ) -> Generator[Request, None, float]:
        """Encode and exchange at once, since operations in flight are told apart by their order;
        add in the order of ranks when the parts have come.
        """
        size, each, own = len(rows), self._num_bytes, collectives.rank
        message = torch.empty(0, dtype=torch.uint8, device="cpu")
        held = [self.scratch.take(message, size * each) for _ in range(2)]
        sent, arrived = (buffer[: size * each].view(size, -1) for buffer in held)
        places = torch.empty(size, self.num_sent, dtype=torch.int64, device="cpu")
        own_flag = self.feedback.flag
        for rank, row in enumerate(rows):
            values, indexes = self._parts(sent[rank], rows.dtype)
            if finite:
                places[rank] = self._choose(row, rank)
                torch.index_select(row, 0, places[rank], out=values[: self.num_sent])
                values[self.num_sent :] = own_flag
            else:
                places[rank] = torch.arange(self.num_sent, device="cpu")
                values.fill_(math.nan)
            indexes.copy_(places[rank])
        if self._shares is not None:
            self._counts(sent).copy_(count_magnitudes(rows.view(-1), finite=finite))
        yield collectives.start_exchange(sent.view(-1), arrived.view(-1))
        arrived[own] = sent[own]
        total = self.feedback.hold(rows, own, (torch.arange(size)[:, None], places))
        flag = 0.0
        for part in arrived:
            values, indexes = self._parts(part, rows.dtype)
            total.index_add_(0, indexes, values[: self.num_sent])
            flag += float(values[self.num_sent :].sum())
        if self._shares is not None:
            self._shares.note(self.index, self._counts(arrived).sum(0) / size**2)
        for buffer in held:
            self.scratch.give_back(buffer)
        return flag

    def start_settling(self, bucket: BucketRuntime, collectives: Collectives) -> Request:
        """Begin with the usual shares, as a resumed run does."""
        if self._shares is not None:
            self._shares.reset()
        return super().start_settling(bucket, collectives)

    def forget(self) -> None:
        """Begin anew."""
        if self._shares is not None:
            self._shares.reset()
        super().forget()

    def _parts(self, message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Values with the flag behind them, and the places in the shard as int32."""
        end = self._num_values * dtype.itemsize
        indexes = message[end : end + self.num_sent * INDEX_BYTES]
        return message[:end].view(dtype), indexes.view(torch.int32)

    def _counts(self, messages: Tensor) -> Tensor:
        """Of each rank's message, how many magnitudes its whole bucket has of each size."""
        counts = messages[:, self._counted_at : self._counted_at + COUNTS_BYTES]
        return counts.view(torch.float32)

    def _choose(self, row: Tensor, rank: int) -> Tensor:
        places, least = largest(row, self.num_sent, self._thresholds[rank])
        self._thresholds[rank] = LOWERED * least
        return places


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
        shards: Sequence[Sequence[Segment]] | None = None,
    ) -> None:
        """As ``SparseReduce``. ``shards``: of what a share is sent, by shard; None: of all."""
        super().__init__(bucket, algorithms, scratch, density=density, feedback=feedback)
        spec, width = bucket.spec, bucket.spec.itemsize
        shards = shards or [[Segment(0, self.numel, self.num_sent)]] * spec.world_size
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
