"""Quantized codecs: 8 or 4 bits for each element, and a scale for each block of elements.

A rank quantizes what it contributes once, and the owner adds the decoded parts in fp32: nothing is
quantized at each hop, as it would be around a ring. What is gathered is the difference between the
owner's parameters and those that replicas show. All ranks add the same decoded bytes, the owner as
well, so that replicas stay equal to the bit; what a step's bytes cannot express is part of the next
step's difference, and so nothing is lost (quantized weight differences: SDP4Bit, arXiv 2410.15526;
error feedback of the server: EF21-BC, arXiv 2110.03294).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from dearmpi.comm.algorithms.scratch import Scratch
from dearmpi.comm.api.collectives import Chain, Collectives, Completed, Request
from dearmpi.config import Compress, Gather
from dearmpi.cuts import Cuts, even_cuts
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.codec.codec import StatelessCodec, gathered_buffer

_PIECE = 1 << 18  # elements at once: calls of smaller ones cost more than the cache saves
_GROUP = 4 * _PIECE  # whose scales are computed at once
_PIECES_A_STEP = 4  # about 1 ms; other operations are polled between two steps
_ALIGNMENT = 64  # bytes
_LOOKED_AT = 1024  # elements
_SPREAD = 2654435761  # a large odd number: neighbours lead to places far from each other
_SCALE_BYTES = 2  # bf16
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # of zeros too; smaller ones have no reciprocal


@dataclass(frozen=True)
class Quantizer:
    """A format: ``bits`` of each element, and one scale for each ``block`` elements.

    Elements become whole numbers from -``most`` to ``most``, times the scale: the block's largest
    magnitude over ``most``, in bf16 and rounded up. A block that is not finite decodes to NaN.

    A message holds the scales of all blocks and then the codes. With 4 bits each byte holds
    element i of a piece, and the one that lies half a piece further.
    """

    bits: int
    block: int

    @property
    def most(self) -> int:
        """The largest code."""
        return (1 << (self.bits - 1)) - 1

    def num_bytes(self, numel: int) -> int:
        """Bytes of the message for ``numel`` elements, with its padding."""
        blocks = -(-numel // self.block)
        unaligned = blocks * (_SCALE_BYTES + self.block * self.bits // 8)
        return -(-unaligned // _ALIGNMENT) * _ALIGNMENT

    def encode(self, values: Tensor, message: Tensor, *, chance: int | None = None) -> None:
        """Write ``values`` into ``message``.

        values: 1-D. message: uint8, of ``num_bytes`` for their number or more.
        chance: a number, such as of the step, by which to round to one of the two nearest codes by
            chance; None: round to the nearest. By chance the mean is right.
        """
        scales, codes = self._parts(message, values.numel())
        for start in range(0, values.numel(), _GROUP):
            group = values[start : start + _GROUP]
            first, last = start // self.block, -(-(start + group.numel()) // self.block)
            factors, is_finite = self._scale(group, scales[first:last])
            for at in range(0, group.numel(), _PIECE):
                scaled = self._load(group[at : at + _PIECE])
                rows = scaled.view(-1, self.block)
                first = at // self.block
                factor = factors[first : first + len(rows)]
                room = self._scratch[: scaled.numel()].view_as(rows)
                if chance is None:
                    scaled = torch.mul(rows, factor, out=room).view(-1)
                else:
                    noise = self._noise(chance + start + at, scaled.numel()).view_as(rows)
                    scaled = torch.addcmul(noise, rows, factor, out=room).view(-1)
                if not is_finite:
                    scaled.nan_to_num_(0.0, 0.0, 0.0)  # others share their bytes
                if chance is None:
                    scaled.round_()
                else:
                    scaled.floor_()
                self._pack(scaled, codes, start + at)

    def decode(self, message: Tensor, into: Tensor, *, adds: bool) -> Iterator[None]:
        """Add ``message`` to ``into``, or overwrite it; stops after each piece.

        The product of a code and a scale is exact in fp32. So every processor comes to the same
        bits, whether or not it rounds before it adds.
        """
        scales, codes = self._parts(message, into.numel())
        wide = scales.float()[:, None]
        for start in range(0, into.numel(), _PIECE):
            target = into[start : start + _PIECE]
            decoded = self._unpack(codes, start, target.numel())
            rows = decoded.view(-1, self.block)
            first = start // self.block
            factor = wide[first : first + len(rows)]
            if adds and target.numel() == decoded.numel():
                target.view_as(rows).addcmul_(rows, factor)
            else:
                decoded = rows.mul_(factor).view(-1)[: target.numel()]
                if adds:
                    target.add_(decoded)
                else:
                    target.copy_(decoded)
            yield

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Scales, and codes as int8: one or two in each."""
        blocks = -(-numel // self.block)
        end = blocks * _SCALE_BYTES
        codes = message[end : end + blocks * self.block * self.bits // 8]
        return message[:end].view(torch.bfloat16), codes.view(torch.int8)

    def _scale(self, values: Tensor, scales: Tensor) -> tuple[Tensor, bool]:
        """Write the ``scales`` of the blocks of ``values``.

        Returns their reciprocals as a column, in fp32, and whether all values are finite.
        """
        largest = torch.empty(len(scales), dtype=torch.float32, device="cpu")
        for at in range(0, values.numel(), _PIECE):
            piece = self._load(values[at : at + _PIECE])
            magnitudes = torch.abs(piece, out=self._scratch[: piece.numel()])
            first, rows = at // self.block, magnitudes.view(-1, self.block)
            torch.amax(rows, 1, out=largest[first : first + len(rows)])
        # Few calls: of short shards they cost as much as the numbers.
        is_finite = math.isfinite(float(largest.sum()))  # or its sum is too large
        wide = _rounded_up(largest.div_(self.most).clamp_(min=_LEAST_SCALE), is_finite=is_finite)
        scales.copy_(wide)
        return wide.reciprocal_()[:, None], is_finite

    def _load(self, values: Tensor) -> Tensor:
        """Values in fp32, up to the end of the last block; in scratch memory if need be."""
        numel = values.numel()
        padded = -(-numel // self.block) * self.block
        if values.dtype == torch.float32 and padded == numel:
            return values
        scratch = self._scratch[:padded]
        scratch[:numel].copy_(values)
        scratch[numel:].zero_()
        return scratch

    def _pack(self, scaled: Tensor, codes: Tensor, start: int) -> None:
        numel = scaled.numel()
        if self.bits == 8:
            codes[start : start + numel].copy_(scaled)
            return
        half = numel // 2
        # The low nibble is counted from -8, so that it needs no sign; the high one has the byte's.
        both = scaled[:half].add_(scaled[half:], alpha=16).add_(8)
        codes[start // 2 : start // 2 + half].copy_(both)

    def _unpack(self, codes: Tensor, start: int, numel: int) -> Tensor:
        padded = -(-numel // self.block) * self.block
        scratch = self._scratch[:padded]
        if self.bits == 8:
            return scratch.copy_(codes[start : start + padded])
        half = padded // 2
        both = codes[start // 2 : start // 2 + half]
        torch.sub(both & 15, 8, out=scratch[:half])
        scratch[half:].copy_(both >> 4)
        return scratch

    def _noise(self, chance: int, numel: int) -> Tensor:
        """Evenly spread over (0, 1): a part of a fixed table, which ``chance`` chooses."""
        first = chance * _SPREAD % (len(self._table) - numel + 1)
        return self._table[first : first + numel]

    @cached_property
    def _scratch(self) -> Tensor:
        return torch.empty(_PIECE, dtype=torch.float32, device="cpu")

    @cached_property
    def _table(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        evenly = torch.rand(2 * _PIECE, generator=generator, dtype=torch.float32, device="cpu")
        # Away from both ends, so that a rounding of ``most`` itself leads to no larger code.
        return evenly.mul_(1 - 2**-15).add_(2**-16)


def quantizer_of(compress: Compress) -> Quantizer:
    """The format of a setting, with scratch memory of its own: for one thread."""
    return Quantizer(bits=4, block=64) if compress == "int4" else Quantizer(bits=8, block=256)


class QuantizedReduce(StatelessCodec):
    """The sum of gradients: each rank sends each owner its part quantized, and keeps its own."""

    def __init__(self, bucket: BucketRuntime, quantizer: Quantizer, scratch: Scratch) -> None:
        """``scratch``: shared by all buckets."""
        self._quantizer, self._scratch = quantizer, scratch
        self._by_chance = quantizer.bits < 8  # else errors of one sign would add up over the steps
        self._cuts, self.sent_bytes = _messages_of(bucket, quantizer)

    def start(self, bucket: BucketRuntime, collectives: Collectives, step: int) -> Request:
        """Encode and exchange at once, since operations in flight are told apart by their order;
        decode and add when the parts have come.
        """
        return Chain(_in_turns(self._steps(bucket, collectives)))

    def _steps(self, bucket: BucketRuntime, collectives: Collectives) -> Iterator[Request | None]:
        size, own = bucket.spec.world_size, collectives.rank
        each = self._cuts.size_of(own)  # bytes that arrive from each rank
        data = bucket.gradients.data[: bucket.spec.numel]  # not the padding, which may be anything
        message = torch.empty(0, dtype=torch.uint8, device="cpu")
        lengths = self._cuts.total, size * each
        held = [self._scratch.take(message, length) for length in lengths]
        sent, arrived = (buffer[:length] for buffer, length in zip(held, lengths, strict=True))
        chance = _chance_of(bucket, own) if self._by_chance else None
        for rank in range(size):
            if rank != own:
                shard = data[bucket.spec.cuts.slice_of(rank)]
                self._quantizer.encode(shard, sent[self._cuts.slice_of(rank)], chance=chance)
        yield collectives.start_exchange(sent, arrived, cuts=self._cuts)
        shard = bucket.gradients.shard
        for rank in range(size):
            if rank != own:
                part = arrived[rank * each : (rank + 1) * each]
                yield from self._quantizer.decode(part, shard, adds=True)
        for buffer in held:
            self._scratch.give_back(buffer)


class QuantizedGather(StatelessCodec):
    """The own shard of parameters, as its difference to what replicas show; or that of averaged
    gradients, as it is.
    """

    def __init__(
        self, bucket: BucketRuntime, quantizer: Quantizer, scratch: Scratch, *, gather: Gather
    ) -> None:
        """``scratch``: shared by all buckets."""
        self._quantizer, self._scratch, self._gather = quantizer, scratch, gather
        # The next difference has all that this one leaves out, but not the next gradient.
        self._by_chance = quantizer.bits < 8 and gather == "gradients"
        self._cuts, self.sent_bytes = _messages_of(bucket, quantizer)

    def start(self, bucket: BucketRuntime, collectives: Collectives, step: int) -> Request:
        """Encode and gather at once, as in ``QuantizedReduce``; decode what has come."""
        return Chain(_in_turns(self._steps(bucket, collectives)))

    def _steps(self, bucket: BucketRuntime, collectives: Collectives) -> Iterator[Request | None]:
        own = collectives.rank
        buffer = gathered_buffer(bucket, self._gather)
        data, shown = buffer.data[: bucket.spec.numel], bucket.shown
        message = torch.empty(0, dtype=torch.uint8, device="cpu")
        held = self._scratch.take(message, self._cuts.total)
        messages = held[: self._cuts.total]
        own_message = messages[self._cuts.slice_of(own)]
        if shown is not None:
            buffer.shard.sub_(shown)
        chance = _chance_of(bucket, own) if self._by_chance else None
        self._quantizer.encode(buffer.shard, own_message, chance=chance)
        request = collectives.start_all_gather(messages, "ring", cuts=self._cuts)
        # The own shard while the message travels.
        if shown is None:
            yield from self._quantizer.decode(own_message, buffer.shard, adds=False)
        else:
            yield from self._quantizer.decode(own_message, shown, adds=True)
            buffer.shard.copy_(shown)
        yield request
        for rank in range(bucket.spec.world_size):
            if rank != own:
                part = messages[self._cuts.slice_of(rank)]
                shard = data[bucket.spec.cuts.slice_of(rank)]
                yield from self._quantizer.decode(part, shard, adds=shown is not None)
        self._scratch.give_back(held)


def _messages_of(bucket: BucketRuntime, quantizer: Quantizer) -> tuple[Cuts, int]:
    """Where the messages of all shards lie in one buffer, and how many bytes a rank sends of them:
    all but one, of uneven shards the mean over the ranks.
    """
    shards, size = bucket.spec.cuts, bucket.spec.world_size
    if shards.is_even:  # the last ones may have padding, and others' length all the same
        cuts = even_cuts(size * quantizer.num_bytes(shards.largest), size)
    else:
        lengths = (quantizer.num_bytes(shards.size_of(rank)) for rank in range(size))
        cuts = Cuts((0, *accumulate(lengths)))
    return cuts, cuts.total - cuts.total // size


def _chance_of(bucket: BucketRuntime, rank: int) -> int:
    """A number that differs from step to step and from rank to rank, and not when a run is repeated
    or resumed: of the parameters, which no rank changes before it has all gradients.
    """
    first = bucket.params[0].detach().reshape(-1)[:_LOOKED_AT].contiguous()
    return zlib.crc32(first.view(torch.uint8).numpy().tobytes(), rank)


def _in_turns(steps: Iterator[Request | None]) -> Iterator[Request]:
    """The requests of ``steps``, and one that is complete after each few pieces."""
    num_pieces = 0
    for request in steps:
        if request is not None:
            yield request
        elif (num_pieces := num_pieces + 1) % _PIECES_A_STEP == 0:
            yield Completed()


def _rounded_up(scales: Tensor, *, is_finite: bool) -> Tensor:
    """``scales``, positive, in fp32, as the next numbers of bf16, in place; NaN unless finite."""
    is_good = None if is_finite else torch.isfinite(scales)
    scales.view(torch.int32).add_(0xFFFF).bitwise_and_(~0xFFFF)
    return scales if is_good is None else torch.where(is_good, scales, torch.nan)
