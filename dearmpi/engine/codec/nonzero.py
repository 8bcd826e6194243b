"""Lossless codecs: only blocks travel that are not zero on some rank, or that a step has changed.

An embedding's gradient is zero but for the rows of a batch. All ranks first learn which blocks any
of them needs, one byte for each. Those blocks then travel as one short buffer. The algorithm and
the order of sums are those of a whole bucket, so that the result is the same to the bit.
Nothing has to be decoded, as a sketch would (lossless homomorphic compression: arXiv 2402.07529,
which also begins with the positions).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.algorithms.scratch import Scratch
from dearmpi.comm.api.collectives import Chain, Collectives, Request
from dearmpi.config import Gather
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.codec.codec import StatelessCodec, elements_sent, gathered_buffer

BLOCK = 64  # elements
_MOST_SENT = 0.6  # of all blocks; beyond, the whole bucket takes no longer
_RARELY = 256  # steps between two looks at a dense bucket at most; they double from one on
_BITS = {4: torch.int32, 8: torch.int64}


class _BlockCodec(StatelessCodec):
    """What both directions share: to look or not, and the blocks on their way.

    Every rank comes to the same decisions, since they follow from flags that all have.
    """

    def __init__(self, bucket: BucketRuntime, scratch: Scratch) -> None:
        spec = bucket.spec
        self._size, self._numel = spec.world_size, spec.largest_shard
        self._num_blocks = -(-self._numel // BLOCK)
        self._scratch = scratch
        self._dense_bytes = elements_sent(bucket) * spec.itemsize
        self._num_starts, self._next_look, self._pause = 0, 1, 1
        self.sent_bytes = self._dense_bytes

    @property
    def will_look(self) -> bool:
        """Whether to look for blocks in the next step."""
        return self._num_starts + 1 >= self._next_look

    def _looks(self) -> bool:
        """Whether to look for blocks in this step."""
        self._num_starts += 1
        self.sent_bytes = self._dense_bytes
        looks = self._num_starts >= self._next_look
        self.fallbacks += not looks
        return looks

    def _take_flags(self) -> Tensor:
        """A byte for each block, by rank; scratch memory."""
        numel = self._size * self._num_blocks
        held: Tensor = self._scratch.take(torch.empty(0, dtype=torch.uint8, device="cpu"), numel)
        return held

    def _chosen(self, flags: Tensor) -> list[Tensor] | None:
        """By rank, the numbers of the blocks that travel; None if all of the bucket does."""
        rows = flags[: self._size * self._num_blocks].view(self._size, -1)
        blocks = [row.nonzero().view(-1) for row in rows]
        most = max(map(len, blocks))
        if most > _MOST_SENT * self._num_blocks:
            self._pause = min(2 * self._pause, _RARELY)
            self._next_look = self._num_starts + self._pause
            self.sent_bytes += (self._size - 1) * self._num_blocks
            self.fallbacks += 1
            return None
        self._pause = 1
        return blocks

    def _take_room(self, data: Tensor, blocks: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Scratch memory, and the part of it in which blocks lie: rank, block, element."""
        most = max(1, *map(len, blocks))
        numel = self._size * most * BLOCK
        held = self._scratch.take(data, numel)
        self.sent_bytes = (self._size - 1) * (most * BLOCK * data.element_size() + self._num_blocks)
        return held, held[:numel].view(self._size, most, BLOCK)

    def _pack(self, shard: Tensor, blocks: Tensor, room: Tensor) -> None:
        """Copy ``blocks`` of a padded ``shard`` to the start of ``room``; the rest is zero."""
        whole, num_whole = self._whole(shard, blocks)
        torch.index_select(whole, 0, blocks[:num_whole], out=room[:num_whole])
        room[num_whole:].zero_()
        if num_whole < len(blocks):
            rest = shard[whole.numel() :]
            room[num_whole, : len(rest)].copy_(rest)

    def _unpack(self, room: Tensor, blocks: Tensor, shard: Tensor) -> None:
        """The way back; other blocks of ``shard`` stay as they are."""
        whole, num_whole = self._whole(shard, blocks)
        whole.index_copy_(0, blocks[:num_whole], room[:num_whole])
        if num_whole < len(blocks):
            rest = shard[whole.numel() :]
            rest.copy_(room[num_whole, : len(rest)])

    def _whole(self, shard: Tensor, blocks: Tensor) -> tuple[Tensor, int]:
        """The blocks of ``shard`` without a shorter last one; how many of ``blocks`` they have."""
        whole = shard[: len(shard) // BLOCK * BLOCK].view(-1, BLOCK)
        has_rest = len(blocks) > 0 and int(blocks[-1]) == len(whole)
        return whole, len(blocks) - has_rest


class NonzeroReduce(_BlockCodec):
    """The sum of gradients: blocks that are zero to the bit on every rank do not travel."""

    def __init__(
        self, bucket: BucketRuntime, algorithms: CollectiveAlgorithms, scratch: Scratch
    ) -> None:
        """``scratch``: shared by all buckets."""
        super().__init__(bucket, scratch)
        # The library's order of sums may depend on the length.
        self._algorithm = CollectiveAlgorithms(algorithms.added_here)

    def start(self, bucket: BucketRuntime, collectives: Collectives, step: int) -> Request:
        """Agree on the blocks, then send those."""
        return Chain(self.send(bucket.gradients.data, collectives))

    def send(
        self, data: Tensor, collectives: Collectives
    ) -> Generator[Request, None, list[Tensor] | None]:
        """Sum ``data``. Returns the blocks that have travelled, by shard; None if all have."""
        if not self._looks():
            yield self._algorithm.start_reduce_scatter(data, collectives)
            return None
        held = self._take_flags()
        flags = held[: self._size * self._num_blocks]
        shards = data.view(self._size, -1)
        for shard, row in zip(shards, flags.view(self._size, -1), strict=True):
            mark(shard, None, row)
        place = collectives.reserve()
        yield collectives.start_all_reduce(flags, "max")
        blocks = self._chosen(flags)
        self._scratch.give_back(held)
        if blocks is None:
            with place:
                request = self._algorithm.start_reduce_scatter(data, collectives)
            yield request
            return None
        held, room = self._take_room(data, blocks)
        for shard, chosen, part in zip(shards, blocks, room, strict=True):
            self._pack(shard, chosen, part)
        with place:
            request = self._algorithm.start_reduce_scatter(room.view(-1), collectives)
        yield request
        own = collectives.rank
        self._unpack(room[own], blocks[own], shards[own])  # its other blocks are zero already
        self._scratch.give_back(held)
        return blocks


class NonzeroGather(_BlockCodec):
    """The own shard: blocks of parameters that the step has changed, or of averaged gradients that
    are not zero.
    """

    def __init__(self, bucket: BucketRuntime, scratch: Scratch, *, gather: Gather) -> None:
        """``scratch``: shared by all buckets."""
        super().__init__(bucket, scratch)
        self._gather = gather

    def start(self, bucket: BucketRuntime, collectives: Collectives, step: int) -> Request:
        """Tell all ranks which blocks follow, then send those."""
        buffer = gathered_buffer(bucket, self._gather)
        return Chain(self._steps(buffer.data, bucket.shown, collectives))

    def _steps(
        self, data: Tensor, shown: Tensor | None, collectives: Collectives
    ) -> Iterator[Request]:
        if not self._looks():
            yield collectives.start_all_gather(data, "ring")
            return
        held, own = self._take_flags(), collectives.rank
        flags, shards = held[: self._size * self._num_blocks], data.view(self._size, -1)
        mark(shards[own], shown, flags.view(self._size, -1)[own])
        place = collectives.reserve()
        yield collectives.start_all_gather(flags, "ring")
        blocks = self._chosen(flags)
        self._scratch.give_back(held)
        if blocks is None:
            with place:
                request = collectives.start_all_gather(data, "ring")
            yield request
            return
        held, room = self._take_room(data, blocks)
        self._pack(shards[own], blocks[own], room[own])
        with place:
            request = collectives.start_all_gather(room.view(-1), "ring")
        yield request
        for rank, (shard, chosen, part) in enumerate(zip(shards, blocks, room, strict=True)):
            if rank != own:
                if shown is None:
                    shard.zero_()
                self._unpack(part, chosen, shard)
        self._scratch.give_back(held)


def mark(shard: Tensor, shown: Tensor | None, flags: Tensor) -> None:
    """Set the flags of blocks whose bits differ from those of ``shown``, or of zero; clear others.

    shown: may be shorter than the padded ``shard``. Padding counts as equal to it.
    """
    bits = shard.view(_BITS[shard.element_size()])
    changed = torch.zeros(len(flags) * BLOCK, dtype=torch.bool, device="cpu")
    if shown is None:
        torch.ne(bits, 0, out=changed[: len(bits)])
    else:
        other = shown.view(bits.dtype)
        torch.ne(bits[: len(other)], other, out=changed[: len(other)])
    torch.amax(changed.view(torch.uint8).view(-1, BLOCK), 1, out=flags)
