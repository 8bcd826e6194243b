"""Codec: what travels for a bucket in one direction.

The dense ones send all as it is; those of half precision send wider numbers in 16 bits.

Each bucket has two: one for its reduce-scatter and one for its all-gather. All methods run on the
progress thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.api.collectives import Collectives, Completed, Request
from dearmpi.config import Gather
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.bucket.buffers import FlatBuffer
from dearmpi.engine.trace.spans import Traffic
from dearmpi.engine.update.master import is_half
from dearmpi.errors import WireRangeError
from dearmpi.plan.model.codec_cost import CodecCost


class Codec(Protocol):
    """Sends one bucket in one direction."""

    @property
    def sent_bytes(self) -> int:
        """What one rank sends in one step, at least; where that varies, in the last one."""
        ...

    @property
    def steady_bytes(self) -> int:
        """As ``sent_bytes``, once the first steps of another kind are over."""
        ...

    @property
    def fallbacks(self) -> int:
        """Times so far that the bucket has travelled whole for want of something shorter."""
        ...

    def start(self, bucket: BucketRuntime, collectives: Collectives, step: int) -> Request:
        """Begin to send ``bucket``; every rank starts the same operations in the same order.

        After a reduce-scatter the own shard of the gradients holds the sum over the ranks, not the
        mean. After an all-gather the whole buffer holds the same bits on every rank.
        ``step`` counts steps taken before this one, resumed runs included; alike on all ranks.
        """
        ...

    def check(self, bucket: BucketRuntime) -> None:
        """Raise WireRangeError for numbers that this codec cannot send.

        A codec of reduce-scatters looks at what has arrived, once no caller may skip the step any
        more; a codec of all-gathers at what is about to leave.
        """
        ...

    @property
    def keeps(self) -> bool:
        """Whether ranks keep what they do not send, for later steps."""
        ...

    @property
    def owes(self) -> bool:
        """Whether there is some, between two steps; the same on all ranks."""
        ...

    def commit(self, bucket: BucketRuntime, *, is_final: bool) -> None:
        """Keep what was not sent. is_final: no caller may skip the step any more; False: a further
        backprop follows, with which this may be discarded.
        """
        ...

    def discard(self) -> None:
        """All that was reduced since the last step is discarded: keep what was kept before."""
        ...

    def own_pieces(self, bucket: BucketRuntime) -> Iterator[tuple[int, Tensor]]:
        """What the own shard holds of each parameter once it is reduced, with its slot."""
        ...

    def start_settling(self, bucket: BucketRuntime, collectives: Collectives) -> Request:
        """Bring what is kept to the owners of its elements, as ``bucket.owed`` (collective)."""
        ...

    def forget(self) -> None:
        """Another state was loaded, to which nothing of this belongs."""
        ...

    def rescale(self, factor: float) -> None:
        """Between two iterations: multiply what is kept by ``factor``, as later gradients are."""
        ...

    def squares(self) -> tuple[float, float] | None:
        """Squared norms of what this rank keeps, and of what it has sent in the last step, for
        people; None where that is not known. Any thread may call it.
        """
        ...


class StatelessCodec:
    """The part of a codec that keeps nothing and carries all numbers."""

    keeps = owes = False
    fallbacks = 0
    sent_bytes: int

    @property
    def steady_bytes(self) -> int:
        """The same in all steps."""
        return self.sent_bytes

    def check(self, bucket: BucketRuntime) -> None:
        """All numbers can be carried."""

    def commit(self, bucket: BucketRuntime, *, is_final: bool) -> None:
        """All was sent."""

    def discard(self) -> None:
        """Nothing is kept."""

    def own_pieces(self, bucket: BucketRuntime) -> Iterator[tuple[int, Tensor]]:
        """Elements."""
        return bucket.own_pieces()

    def forget(self) -> None:
        """Nothing is kept."""

    def rescale(self, factor: float) -> None:
        """Nothing is kept."""

    def squares(self) -> tuple[float, float] | None:
        """Nothing is kept, or it is not known how much."""
        return None

    def start_settling(self, bucket: BucketRuntime, collectives: Collectives) -> Request:
        """Nothing is to be brought."""
        return Completed()


class DenseFirst:
    """A codec in whose place another one sends in the first steps, as those of a warm-up."""

    def __init__(self, codec: Codec, dense: Codec, *, num_steps: int) -> None:
        """``dense``: sends in the first ``num_steps``."""
        self._codec, self._dense, self._num_steps = codec, dense, num_steps
        self._now = dense

    @property
    def sent_bytes(self) -> int:
        """Of the codec that was in use last."""
        return self._now.sent_bytes

    @property
    def steady_bytes(self) -> int:
        """Of the codec that follows."""
        return self._codec.steady_bytes

    @property
    def fallbacks(self) -> int:
        """Of the codec that follows."""
        return self._codec.fallbacks

    @property
    def keeps(self) -> bool:
        """As the codec does."""
        return self._codec.keeps

    @property
    def owes(self) -> bool:
        """As the codec does."""
        return self._codec.owes

    def start(self, bucket: BucketRuntime, collectives: Collectives, step: int) -> Request:
        """Have one of the two begin."""
        self._now = self._dense if step < self._num_steps else self._codec
        return self._now.start(bucket, collectives, step)

    def check(self, bucket: BucketRuntime) -> None:
        """As the one in use does."""
        self._now.check(bucket)

    def commit(self, bucket: BucketRuntime, *, is_final: bool) -> None:
        """As the one in use does."""
        self._now.commit(bucket, is_final=is_final)

    def discard(self) -> None:
        """As the codec does."""
        self._codec.discard()

    def own_pieces(self, bucket: BucketRuntime) -> Iterator[tuple[int, Tensor]]:
        """As the one in use does."""
        return self._now.own_pieces(bucket)

    def start_settling(self, bucket: BucketRuntime, collectives: Collectives) -> Request:
        """As the codec does."""
        return self._codec.start_settling(bucket, collectives)

    def forget(self) -> None:
        """As the codec does."""
        self._codec.forget()

    def rescale(self, factor: float) -> None:
        """As the codec does."""
        self._codec.rescale(factor)

    def squares(self) -> tuple[float, float] | None:
        """As the codec does."""
        return self._codec.squares()


class DenseReduce(StatelessCodec):
    """The sum of gradients."""

    def __init__(self, bucket: BucketRuntime, algorithms: CollectiveAlgorithms) -> None:
        self._algorithms = algorithms
        self.sent_bytes = elements_sent(bucket) * bucket.spec.itemsize

    def start(self, bucket: BucketRuntime, collectives: Collectives, step: int) -> Request:
        """Post the reduce-scatter."""
        buffer, cuts = bucket.gradients.data, bucket.spec.cuts
        return self._algorithms.start_reduce_scatter(buffer, collectives, cuts)


class DenseGather(StatelessCodec):
    """The own shard of updated parameters, or of averaged gradients."""

    def __init__(
        self, bucket: BucketRuntime, algorithms: CollectiveAlgorithms, *, gather: Gather
    ) -> None:
        self._algorithms, self._gather = algorithms, gather
        self.sent_bytes = elements_sent(bucket) * bucket.spec.itemsize

    def start(self, bucket: BucketRuntime, collectives: Collectives, step: int) -> Request:
        """Post the all-gather."""
        buffer, shown = gathered_buffer(bucket, self._gather), bucket.shown
        if shown is not None:  # the next difference is to what replicas show from now on
            shown.copy_(buffer.shard)
        return self._algorithms.start_all_gather(buffer.data, collectives, bucket.spec.cuts)


def gathered_buffer(bucket: BucketRuntime, gather: Gather) -> FlatBuffer:
    """Where the numbers lie that an all-gather carries."""
    if gather == "gradients":
        return bucket.gradients
    assert bucket.parameters is not None, "parameters that are gathered lie in a flat buffer"
    return bucket.parameters


def elements_sent(bucket: BucketRuntime) -> int:
    """How many elements one rank sends in a reduce-scatter or an all-gather: all shards but one; of
    uneven shards the mean over the ranks.
    """
    spec = bucket.spec
    if spec.cuts.is_even:
        return spec.padded_numel - spec.largest_shard
    return spec.padded_numel - spec.padded_numel // spec.world_size


_BYTES = 2
_LARGEST = 65504.0
_ROUNDED_DOWN = 65520.0  # from here on, the nearest number of fp16 is infinity


def compresses(codec: Codec) -> bool:
    """Whether it computes what it sends, and does not send numbers as they are or rounded."""
    return not isinstance(codec, (DenseReduce, DenseGather))


class HalfReduce(DenseReduce):
    """The sum of gradients, formed in their own dtype from parts in half precision.

    What fp16 cannot hold is found before an optimizer or another rank takes it for real; bf16 has
    the range of fp32. Each rank looks at its own shard, so that each number is looked at once.
    """

    def __init__(self, bucket: BucketRuntime, algorithms: CollectiveAlgorithms) -> None:
        super().__init__(bucket, algorithms)
        self.sent_bytes = elements_sent(bucket) * _BYTES

    def check(self, bucket: BucketRuntime) -> None:
        """Raise WireRangeError unless the own shard of reduced gradients is finite."""
        shard = bucket.gradients.shard
        if self._algorithms.wire_dtype == "fp16" and not _largest(shard) < float("inf"):
            raise WireRangeError(
                f"gradients of bucket {bucket.index} ({_name(bucket)}) are not finite: one of "
                f"them, or of their sums, went beyond {_LARGEST:g}, where fp16 ends, or was not "
                "finite before it was sent; use comm_dtype 'bf16', which has the range of fp32, or "
                "dearmpi.GradScaler, which leaves out such steps",
                code="beyond-half-precision",
            )


class HalfGather(DenseGather):
    """The own shard, rounded as all ranks receive it."""

    def __init__(
        self, bucket: BucketRuntime, algorithms: CollectiveAlgorithms, *, gather: Gather
    ) -> None:
        super().__init__(bucket, algorithms, gather=gather)
        self.sent_bytes = elements_sent(bucket) * _BYTES

    def check(self, bucket: BucketRuntime) -> None:
        """Raise WireRangeError unless fp16 can hold the own shard of updated parameters.

        Gathered gradients are looked at when they have arrived, by the codec that reduced them.
        """
        if self._gather == "gradients" or self._algorithms.wire_dtype != "fp16":
            return
        largest = _largest(gathered_buffer(bucket, self._gather).shard)
        if not largest < _ROUNDED_DOWN:
            raise WireRangeError(
                f"parameters of bucket {bucket.index} ({_name(bucket)}) have come to {largest:g}, "
                f"and fp16, in which they are gathered, ends at {_LARGEST:g}; use comm_dtype "
                "'bf16', which has the range of fp32",
                code="beyond-half-precision",
            )


def dense_codecs(
    bucket: BucketRuntime, algorithms: CollectiveAlgorithms, *, gather: Gather
) -> tuple[Codec, Codec]:
    """Both ways of what is not compressed; what is of half precision travels as it is."""
    if algorithms.wire_dtype is None or is_half(bucket.params[0]):
        return DenseReduce(bucket, algorithms), DenseGather(bucket, algorithms, gather=gather)
    return HalfReduce(bucket, algorithms), HalfGather(bucket, algorithms, gather=gather)


@dataclass(frozen=True, slots=True)
class Codecs:
    """By bucket: how its gradients are reduced, and how its shards are gathered.

    algorithms: by which dense ones travel, and those of half precision. trained: the buckets that
    are.
    """

    reduce: tuple[Codec, ...]
    gather: tuple[Codec, ...]
    algorithms: CollectiveAlgorithms
    trained: tuple[BucketRuntime, ...] = ()

    def cost(self, compress: str, reduce_s: float, gather_s: float) -> CodecCost | None:
        """What compression costs of all that is trained; None where nothing is compressed.

        reduce_s, gather_s: seconds of a step in which codecs compute.
        """
        chosen = self.compressed
        dense = sum(elements_sent(bucket) * bucket.spec.itemsize for bucket in chosen)
        if not dense:
            return None
        nbytes = sum(bucket.spec.nbytes for bucket in chosen)
        return CodecCost(
            compress,
            sum(self.reduce[bucket.index].steady_bytes for bucket in chosen) / dense,
            sum(self.gather[bucket.index].steady_bytes for bucket in chosen) / dense,
            reduce_s / nbytes,
            gather_s / nbytes,
        )

    @property
    def compressed(self) -> list[BucketRuntime]:
        """Those of the trained buckets that do not travel whole in every step."""
        return [bucket for bucket in self.trained if compresses(self.reduce[bucket.index])]

    @property
    def traffic(self) -> Traffic:
        """Of all that is trained; where the bytes vary, of the last step."""
        known = [one for bucket in self.trained if (one := self.reduce[bucket.index].squares())]
        owed, sent = (sum(parts) for parts in zip(*known, strict=True)) if known else (0.0, 0.0)
        return Traffic(
            sum(self.reduce[bucket.index].sent_bytes for bucket in self.trained),
            sum(self.gather[bucket.index].sent_bytes for bucket in self.trained),
            2 * sum(elements_sent(one) * one.spec.itemsize for one in self.trained),
            owed / (owed + sent) if owed + sent > 0 else None,
            self.fallbacks,
        )

    @property
    def fallbacks(self) -> int:
        """Times so far that a bucket has travelled whole for want of something shorter."""
        return sum(codec.fallbacks for codec in (*self.reduce, *self.gather))


def _largest(shard: Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    return float(torch.linalg.vector_norm(shard, float("inf"))) if shard.numel() else 0.0


def _name(bucket: BucketRuntime) -> str:
    first, last = bucket.spec.names[0], bucket.spec.names[-1]
    return first if first == last else f"{first} .. {last}"
