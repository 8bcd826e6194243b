"""Flat buffers: the contiguous storage of a bucket, with one view per parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dearmpi.engine.device.device import zeros
from dearmpi.plan.data.layout import Bucket

_ALIGNMENT = 64  # bytes; a cache line
# Of a zeroed stretch, so that the padding of another layout fits as well; fresh memory that nobody
# touches takes none.
_SPARE_PART = 256


class Arena:
    """One stretch of host memory for the flat buffers of all buckets, made at first use.

    What the model's tensors leave behind when they move here is then one stretch as well, which
    the next arena fits into; buffers made one by one would leave holes. On other devices each
    buffer is allocated by itself: their allocators keep blocks by size. Buckets that are frozen at
    the start have a stretch of their own, which may never be needed.
    """

    def __init__(self, buckets: Iterable[Bucket], *, zeroed: bool = True) -> None:
        """``zeroed``: else on the host nothing is, since every element that has a meaning is about
        to be written.
        """
        self._zeroed = zeroed
        self._starts: dict[int, int] = {}
        self._nbytes = {True: 0, False: 0}
        self._stretches: dict[bool, NDArray[np.uint8]] = {}
        for bucket in buckets:
            start = self._starts[bucket.index] = self._nbytes[bucket.trained]
            self._nbytes[bucket.trained] = -(-(start + bucket.nbytes) // _ALIGNMENT) * _ALIGNMENT

    def take(self, bucket: Bucket, like: Tensor) -> Tensor:
        """The storage of ``bucket``: 1-D, with the dtype and device of ``like``."""
        if like.device.type != "cpu":
            return zeros(bucket.padded_numel, like)
        if bucket.trained not in self._stretches:
            self._stretches[bucket.trained] = self._make(bucket.trained)
        start = self._starts[bucket.index]
        # By way of numpy each bucket is a storage to torch, which copies and saves whole storages.
        part = self._stretches[bucket.trained][start : start + bucket.nbytes]
        return torch.from_numpy(part).view(like.dtype)

    def _make(self, trained: bool) -> NDArray[np.uint8]:
        nbytes = self._nbytes[trained]
        if not self._zeroed:
            return np.empty(nbytes, np.uint8)
        return np.zeros(nbytes + nbytes // _SPARE_PART, np.uint8)


class FlatBuffer:
    """``data``, 1-D, of ``bucket.padded_numel`` elements; what is in the padding means nothing.

    views: per parameter, in the parameter's shape and memory format.
    shard: the elements that this rank owns, without padding; the last ranks may own none.
    """

    def __init__(self, bucket: Bucket, data: Tensor, like: Sequence[Tensor], *, rank: int) -> None:
        """``like``: a tensor of the shape and memory format of each parameter."""
        self.data = data
        self.views = [
            shaped_like(tensor, _apart(self.data, placed.start, placed.stop), 0)
            for placed, tensor in zip(bucket.placements, like, strict=True)
        ]
        start, stop = bucket.shard_range(rank)
        self.shard = self.data[: bucket.numel][start:stop]


def _apart(flat: Tensor, start: int, stop: int) -> Tensor:
    """Elements of ``flat`` from ``start`` to ``stop``; on the host a storage of their own to torch,
    which copies and saves whole storages: of one parameter, say, and not all of its bucket.
    """
    part = flat[start:stop]
    if part.device.type != "cpu":
        return part
    return torch.from_numpy(part.view(torch.uint8).numpy()).view(part.dtype)


def shaped_like(tensor: Tensor, flat: Tensor, start: int) -> Tensor:
    """The view of ``flat`` from element ``start`` on that has ``tensor``'s shape and strides.

    The order in memory is kept, as with channels-last or a transposed matrix; what leaves gaps, or
    has several elements in one place, becomes contiguous.
    """
    strides = tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape).stride()
    return flat.as_strided(tensor.shape, strides, flat.storage_offset() + start)


def flattened(tensor: Tensor) -> Tensor:
    """``tensor``'s elements in the order in which a flat buffer stores them, 1-D."""
    if is_dense(tensor):
        return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return tensor.detach().contiguous().view(-1)


def is_dense(tensor: Tensor) -> bool:
    """Whether ``tensor`` fills one stretch of memory, each element once, in whatever order."""
    if tensor.is_contiguous():
        return True
    filled = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(dim for dim in dims if dim[1] != 1):
        if stride != filled:
            return False
        filled *= size
    return True
