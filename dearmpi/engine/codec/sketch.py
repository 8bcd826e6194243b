"""Sketch: blocks that are not zero are added up in a few cells, which nobody decodes on the way.

Lossless homomorphic compression (arXiv 2402.07529) adds sketches of sparse gradients. Its reference
guesses what it cannot decode. Here cells hold whole numbers, whose sums are exact; an owner checks
that nothing is left in them. Where anything is, or a number does not fit, the bucket travels whole.

Cells and the positions of blocks travel together. How many cells, and the unit of the whole
numbers, follow from the step before. The rounding to that unit waits in each rank's residual.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.algorithms.scratch import Scratch
from dearmpi.comm.api.collectives import AllOf, Chain, Collectives, Request
from dearmpi.config import EngineConfig
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.codec.codec import Codec
from dearmpi.engine.codec.nonzero import BLOCK, NonzeroGather, NonzeroReduce, mark
from dearmpi.engine.codec.residual import ErrorFeedback, Sent
from dearmpi.engine.codec.sparse import FAR_APART

NUM_TABLES = 3
_CELLS_PER_KEY = 1.4  # fewer fail to decode too often
_SPARE_CELLS = 8  # of each table
_GROWTH, _MARGIN = 1.1, 2  # from step to step: of the number of blocks, and of exponents
_BITS = 30
_MOST_RANKS = 255  # flags are added up in bytes
_MOST_CELLS = 0.6  # of all blocks
_NO_EXPONENT = -(1 << 20)  # of zeros
_NOTHING: Sent = (slice(None), slice(0, 0))


class Outlook(NamedTuple):
    """What all ranks expect of the next step. exponent: of the largest number on any rank. count:
    of a shard's blocks. turn: steps so far.
    """

    exponent: int
    num_blocks: int
    turn: int

    @property
    def width(self) -> int:
        """Cells of a table."""
        return (
            math.ceil(_CELLS_PER_KEY * (_GROWTH * self.num_blocks + 1) / NUM_TABLES) + _SPARE_CELLS
        )


class SketchReduce(NonzeroReduce):
    """The sum of gradients."""

    keeps = True

    def __init__(
        self, bucket: BucketRuntime, algorithms: CollectiveAlgorithms, scratch: Scratch
    ) -> None:
        """``scratch``: shared by all buckets."""
        super().__init__(bucket, algorithms, scratch)
        self._feedback = ErrorFeedback(bucket.spec.world_size, keeps=True)
        self._index = bucket.index
        self._next: Outlook | None = None
        self._certain: Outlook | None = None  # of the last step that counts
        bucket.keeps_unused = True

    @property
    def owes(self) -> bool:  # type: ignore[override]
        """As the error feedback does."""
        return self._feedback.owes

    def start(self, bucket: BucketRuntime, collectives: Collectives, step: int) -> Request:
        """Post the sketch, or in the first step the blocks themselves."""
        data = bucket.gradients.data
        data[bucket.spec.numel :].zero_()  # the padding may be anything
        self._feedback.add_to(data)
        largest = float(torch.linalg.vector_norm(data, math.inf))
        exponent = _NO_EXPONENT
        if math.isfinite(largest) and largest > 0:
            exponent = math.frexp(largest)[1]
        if (outlook := self._next) is None:
            return Chain(self._learn(data, collectives, exponent))
        can_send = math.isfinite(largest) and exponent <= outlook.exponent + _MARGIN
        return Chain(self._sketch(data, collectives, outlook, exponent, can_send=can_send))

    def _learn(self, data: Tensor, collectives: Collectives, exponent: int) -> Iterator[Request]:
        """Send the blocks as they are, and agree on what is to be expected."""
        own, looks = collectives.rank, self.will_look
        table = _table(self._size, own, (0, exponent, 0))
        if looks:
            agreeing = collectives.start_all_gather(table.view(-1), "ring")
        blocks = yield from self.send(data, collectives)
        self._hold_sum(data, own)
        if looks:
            self.sent_bytes += (self._size - 1) * table[0].nbytes
            yield agreeing
        if blocks is not None:
            self._expect(table, max(map(len, blocks)), turn=1)

    def _sketch(
        self,
        data: Tensor,
        collectives: Collectives,
        outlook: Outlook,
        exponent: int,
        *,
        can_send: bool,
    ) -> Iterator[Request]:
        own, rows = collectives.rank, data.view(self._size, -1)
        held, flags, cells = self._take_sketches(outlook.width)
        unit, seed = self._unit(outlook), self._index * FAR_APART + outlook.turn
        kept: list[tuple[Tensor, Tensor]] = []
        if can_send:
            for row, flagged, sketch in zip(rows, flags, cells, strict=True):
                mark(row, None, flagged)
                kept.append(self._encode(row, flagged, sketch, unit=unit, seed=seed))
        ring = CollectiveAlgorithms("ring")
        posted = [
            ring.start_reduce_scatter(flags.view(-1), collectives),
            ring.start_reduce_scatter(cells.view(-1), collectives),
        ]
        to_agree, to_fall_back = collectives.reserve(), collectives.reserve()
        yield AllOf(posted)
        blocks = flags[own].nonzero().view(-1)
        sums = peel(blocks, cells[own], seed=seed)
        is_over = not can_send or sums is None
        table = _table(self._size, own, (int(is_over), exponent, len(blocks)))
        with to_agree:
            request = collectives.start_all_gather(table.view(-1), "ring")
        yield request
        has_failed = bool(table[:, 0].any())
        if has_failed:
            for row, (chosen, values) in zip(rows, kept, strict=False):
                self._unpack(values, chosen, row)
            self.fallbacks += 1
        # The place is used in any case, so that ranks count operations alike.
        rest = data if has_failed else data.new_zeros(self._size)
        sent = flags.nbytes + cells.nbytes + table.nbytes + rest.nbytes
        self.sent_bytes = sent // self._size * (self._size - 1)
        with to_fall_back:
            request = self._algorithm.start_reduce_scatter(rest, collectives)
        yield request
        if has_failed:
            self._hold_sum(data, own)
        else:
            assert sums is not None
            shard = self._feedback.hold(rows, own, _NOTHING)
            self._unpack(sums.double().mul_(unit).to(data.dtype), blocks, shard)
        for buffer in held:
            self._scratch.give_back(buffer)
        self._expect(table, int(table[:, 2].max()), turn=outlook.turn + 1)

    def _take_sketches(self, width: int) -> tuple[list[Tensor], Tensor, Tensor]:
        """Scratch memory; the flags and the cells in it, by shard, all zero."""
        numel = self._size * NUM_TABLES * width * BLOCK
        like = torch.empty(0, dtype=torch.int32, device="cpu")
        held = [self._take_flags(), self._scratch.take(like, numel)]
        flags = held[0][: self._size * self._num_blocks].view(self._size, -1)
        return held, flags.zero_(), held[1][:numel].zero_().view(self._size, -1, BLOCK)

    def _encode(
        self, row: Tensor, flagged: Tensor, sketch: Tensor, *, unit: float, seed: int
    ) -> tuple[Tensor, Tensor]:
        """Add the blocks of ``row`` to ``sketch``, and leave their rounding. Returns the numbers of
        the blocks, and the elements that were there.
        """
        blocks = flagged.nonzero().view(-1)
        values = row.new_empty(len(blocks), BLOCK)
        self._pack(row, blocks, values)
        whole = values.double().div_(unit).round_()
        numbers = whole.int()
        for place in places_of(blocks, len(sketch) // NUM_TABLES, seed=seed):
            sketch.index_add_(0, place, numbers)
        self._unpack(values.double().sub_(whole.mul_(unit)).to(row.dtype), blocks, row)
        return blocks, values

    def _unit(self, outlook: Outlook) -> float:
        """Of the whole numbers, whose sums over the ranks have ``_BITS`` bits: a power of two."""
        spare = math.ceil(math.log2(self._size)) + _MARGIN
        return math.ldexp(1.0, max(-1000, outlook.exponent + spare - _BITS))

    def _expect(self, table: Tensor, count: int, *, turn: int) -> None:
        """Expect what all ranks have found; nothing where a sketch would be no shorter."""
        outlook = Outlook(int(table[:, 1].max()), count, turn)
        pays = NUM_TABLES * outlook.width <= _MOST_CELLS * self._num_blocks
        serves = self._size <= _MOST_RANKS and outlook.exponent > _NO_EXPONENT
        self._next = outlook if pays and serves else None

    def _hold_sum(self, data: Tensor, own: int) -> None:
        """All was sent, and the own shard has its sums."""
        if self._feedback.owes:
            rows = data.view(self._size, -1)
            sums = rows[own].clone()
            data.zero_()
            self._feedback.hold(rows, own, _NOTHING).copy_(sums)

    def commit(self, bucket: BucketRuntime, *, is_final: bool) -> None:
        """Keep the rounding."""
        self._feedback.commit(bucket.gradients.data, is_final=is_final)
        if is_final:
            self._certain = self._next

    def discard(self) -> None:
        """Expect what was expected before."""
        self._feedback.discard()
        self._next = self._certain

    def start_settling(self, bucket: BucketRuntime, collectives: Collectives) -> Request:
        """Bring the residuals to the owners, for their next update (collective)."""
        request = self._feedback.start_settling(bucket, collectives, self._algorithm)
        self.forget()
        return request

    def forget(self) -> None:
        """Begin anew."""
        self._feedback.forget()
        self._next = self._certain = None

    def rescale(self, factor: float) -> None:
        """Multiply the residual, and expect larger or smaller numbers."""
        self._feedback.rescale(factor)
        if self._next is not None:
            exponent = self._next.exponent + math.ceil(math.log2(factor))
            self._next = self._certain = self._next._replace(exponent=exponent)


def places_of(blocks: Tensor, width: int, *, seed: int) -> list[Tensor]:
    """The cell of each of ``blocks`` in each table; tables lie one behind the other."""
    keys = blocks.numpy().astype(np.uint64)
    found = []
    for table in range(NUM_TABLES):
        mixed = keys + np.uint64((seed * NUM_TABLES + table + 1) * 0x9E3779B97F4A7C15 % (1 << 64))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
        places = (mixed % np.uint64(width)).astype(np.int64) + table * width
        found.append(torch.from_numpy(places))
    return found


def peel(blocks: Tensor, cells: Tensor, *, seed: int) -> Tensor | None:
    """The sums of ``blocks``, [number, BLOCK]; None where ``cells`` do not tell them.

    A cell of one block alone has its sums, which are taken out of the block's other cells, and so
    on. In the end all cells, which are changed, are zero, since all arithmetic is exact modulo
    2**32.
    """
    width = len(cells) // NUM_TABLES
    places = torch.stack(places_of(blocks, width, seed=seed))
    sums = cells.new_empty(len(blocks), BLOCK)
    counts = torch.bincount(places.view(-1), minlength=len(cells))
    left = torch.arange(len(blocks), device="cpu")
    while len(left):
        alone = counts[places[:, left]] == 1
        is_found = alone.any(0)
        if not bool(is_found.any()):
            return None
        found = left[is_found]
        table = alone[:, is_found].byte().argmax(0)
        values = cells[places[table, found]]
        sums[found] = values
        for place in places[:, found]:
            cells.index_add_(0, place, values, alpha=-1)
            counts.index_add_(0, place, torch.full_like(place, -1))
        left = left[~is_found]
    return None if bool(cells.any()) else sums


def _table(size: int, rank: int, row: tuple[int, int, int]) -> Tensor:
    """A row for each rank, of which this one has its own."""
    table = torch.zeros(size, len(row), dtype=torch.int32, device="cpu")
    table[rank] = torch.tensor(row, dtype=torch.int32)
    return table


def exact_codecs(
    bucket: BucketRuntime,
    algorithms: CollectiveAlgorithms,
    config: EngineConfig,
) -> tuple[Codec, Codec]:
    """Of blocks that are not zero: one by one, or added up in sketches."""
    reduce = SketchReduce if config.compress == "sketch" else NonzeroReduce
    scratch = algorithms.scratch
    gather = NonzeroGather(bucket, scratch, gather=config.gather)
    return reduce(bucket, algorithms, scratch), gather
