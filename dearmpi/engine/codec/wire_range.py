"""Wire range: what fp16 cannot hold, found before an optimizer or another rank takes it for real.

bf16 has the range of fp32. Looked at is what this rank owns, so that each number is looked at by
one rank of all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dearmpi.config import WireDtype
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.update.master import is_half
from dearmpi.errors import WireRangeError

_LARGEST = 65504.0
_ROUNDED_DOWN = 65520.0  # from here on, the nearest number of fp16 is infinity


def check_gradients(bucket: BucketRuntime, wire_dtype: WireDtype | None) -> None:
    """Raise WireRangeError unless the own shard of reduced gradients is finite.

    To be called when nobody may skip the step any more, as a gradient scaler does.
    """
    shard = bucket.gradients.shard
    if _is_limited(shard, wire_dtype) and not _largest(shard) < float("inf"):
        raise WireRangeError(
            f"gradients of bucket {bucket.index} ({_name(bucket)}) are not finite: one of them, or "
            f"of their sums, went beyond {_LARGEST:g}, where fp16 ends, or was not finite before "
            "it was sent; use comm_dtype 'bf16', which has the range of fp32, or "
            "dearmpi.GradScaler, which leaves out such steps",
            code="beyond-half-precision",
        )


def check_parameters(bucket: BucketRuntime, wire_dtype: WireDtype | None) -> None:
    """Raise WireRangeError unless ``wire_dtype`` can hold the own shard of updated parameters."""
    assert bucket.parameters is not None
    shard = bucket.parameters.shard
    if _is_limited(shard, wire_dtype) and not (largest := _largest(shard)) < _ROUNDED_DOWN:
        raise WireRangeError(
            f"parameters of bucket {bucket.index} ({_name(bucket)}) have come to {largest:g}, and "
            f"fp16, in which they are gathered, ends at {_LARGEST:g}; use comm_dtype 'bf16', which "
            "has the range of fp32",
            code="beyond-half-precision",
        )


def _is_limited(shard: Tensor, wire_dtype: WireDtype | None) -> bool:
    return wire_dtype == "fp16" and not is_half(shard)


def _largest(shard: Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    return float(torch.linalg.vector_norm(shard, float("inf"))) if shard.numel() else 0.0


def _name(bucket: BucketRuntime) -> str:
    first, last = bucket.spec.names[0], bucket.spec.names[-1]
    return first if first == last else f"{first} .. {last}"
