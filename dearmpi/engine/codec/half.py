"""Half-precision codecs: numbers that are wider travel in 16 bits.

What fp16 cannot hold is found before an optimizer or another rank takes it for real. bf16 has the
range of fp32. Each rank looks at its own shard, so that each number is looked at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.config import Gather
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.codec.codec import (
    DenseGather,
    DenseReduce,
    elements_sent,
    gathered_buffer,
)
from dearmpi.errors import WireRangeError

_BYTES = 2
_LARGEST = 65504.0
_ROUNDED_DOWN = 65520.0  # from here on, the nearest number of fp16 is infinity


class HalfReduce(DenseReduce):
    """The sum of gradients, formed in their own dtype from parts in half precision."""

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


def _largest(shard: Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    return float(torch.linalg.vector_norm(shard, float("inf"))) if shard.numel() else 0.0


def _name(bucket: BucketRuntime) -> str:
    first, last = bucket.spec.names[0], bucket.spec.names[-1]
    return first if first == last else f"{first} .. {last}"
