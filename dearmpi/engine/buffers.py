"""Flat buffers: the contiguous storage of a bucket, with one view per parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dearmpi.plan.layout import Bucket


class FlatBuffer:
    """1-D storage of ``bucket.padded_numel`` elements; what is in the padding means nothing.

    views: per parameter, in the parameter's shape and memory format.
    shard: the elements that this rank owns, without padding; the last ranks may own none.
    """

    def __init__(self, bucket: Bucket, like: Sequence[Tensor], *, rank: int) -> None:
        self.data = torch.zeros(
            bucket.padded_numel, dtype=like[0].dtype, device=like[0].device, requires_grad=False
        )
        self.views = [
            shaped_like(tensor, self.data, slot.start)
            for slot, tensor in zip(bucket.slots, like, strict=True)
        ]
        start, stop = bucket.shard_range(rank)
        self.shard = self.data[: bucket.numel][start:stop]


def shaped_like(tensor: Tensor, flat: Tensor, start: int) -> Tensor:
    """The view of ``flat`` from element ``start`` on that has ``tensor``'s shape and strides.

    Memory formats such as channels-last are kept; anything else that is not contiguous becomes so.
    """
    strides = tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape).stride()
    return flat.as_strided(tensor.shape, strides, flat.storage_offset() + start)


def flattened(tensor: Tensor) -> Tensor:
    """``tensor``'s elements in the order in which a flat buffer stores them, 1-D."""
    if is_dense(tensor):
        return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return tensor.detach().contiguous().view(-1)


def is_dense(tensor: Tensor) -> bool:
    """Whether ``tensor`` fills one stretch of memory in a format that a view can keep."""
    if tensor.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    memory_format = formats.get(tensor.dim())
    return memory_format is not None and tensor.is_contiguous(memory_format=memory_format)
