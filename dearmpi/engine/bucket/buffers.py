"""Flat buffers: the contiguous storage of a bucket, with one view per parameter."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dearmpi.device.accelerator import zeros
from dearmpi.plan.data.layout import Bucket
from dearmpi.torch_internals import storage_owners

_LEAST_BYTES = 1 << 20  # to copy less takes no longer than to look whether it can be adopted
_ALIGNMENT = 64  # bytes; a cache line
# Of a zeroed block, so that the padding of another layout fits as well; fresh memory that nobody
# touches takes none.
_SPARE_PART = 256


class Arena:
    """One block of host memory for the flat buffers of all buckets, made at first use.

    What the model's tensors leave behind when they move here is then one block as well. The next
    arena fits into it; buffers made one by one would leave holes. On other devices each
    buffer is allocated by itself: their allocators keep blocks by size. Buckets that are frozen at
    the start have a block of their own, which may never be needed.
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
    """Whether ``tensor`` fills one block of memory, each element once, in whatever order."""
    if tensor.is_contiguous():
        return True
    filled = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(dim for dim in dims if dim[1] != 1):
        if stride != filled:
            return False
        filled *= size
    return True


class GradientMemory:
    """A flat buffer of the bucket's own, made when the first gradient is expected; or what autograd
    has written a gradient to that is all of the bucket, adopted until ``give_up``.

    To adopt saves a copy, and memory: of a tied embedding autograd makes two gradients, beside
    which a buffer would lie unused. Only on the host, where nothing that is freed is still queued
    to be read; and only what has no other owner, who would find sums over ranks in it.

    made: the buffer of the bucket's own, if there is one by now.
    keeps: gradients stay until the next backprop begins, for a script to read. lent: a script may
        hold a view of them for longer.
    """

    def __init__(self, spec: Bucket, params: Sequence[Tensor], *, rank: int, arena: Arena) -> None:
        self._spec, self._params, self._rank, self._arena = spec, params, rank, arena
        self.made: FlatBuffer | None = None
        self.keeps = self.lent = False
        self._owns_block = True  # of the arena, once it has taken one
        self._adopted: FlatBuffer | None = None
        is_whole = len(params) == 1 and spec.numel == spec.padded_numel
        self._may_adopt = (
            is_whole and spec.nbytes >= _LEAST_BYTES and params[0].device.type == "cpu"
        )

    @property
    def buffer(self) -> FlatBuffer:
        """Where the gradients lie."""
        if (adopted := self._adopted) is not None:
            return adopted
        if self.made is None:
            likes = [param.detach() for param in self._params]
            if self._owns_block:
                data = self._arena.take(self._spec, likes[0])
            else:
                data = zeros(self._spec.padded_numel, likes[0])
            self.made = FlatBuffer(self._spec, data, likes, rank=self._rank)
        return self.made

    def adopt(self, taken: list[Tensor]) -> bool:
        """Make the one gradient in ``taken``, which must be all that refers to it, the buffer.
        False, with nothing changed, where that cannot be.
        """
        if not self._may_adopt or type(taken[0]) is not Tensor or _owners(taken) != _SOLE:
            return False
        grad, param = taken[0], self._params[0].detach()
        if not is_dense(param) or not _is_stored_as(grad, param):
            return False
        self._adopted = FlatBuffer(self._spec, flattened(grad), [param], rank=self._rank)
        return True

    def give_up(self) -> None:
        """No stage needs this iteration's gradients any more."""
        if not self.keeps:
            self._adopted = None

    def renew(self) -> None:
        """Leave to the script what it may hold, and what is kept of an adopted gradient."""
        self._adopted = None
        if self.lent:
            self.made, self.lent, self._owns_block = None, False, False


def _is_stored_as(grad: Tensor, param: Tensor) -> bool:
    """Whether element by element, in the same order, and none of them to be read as another."""
    same = (grad.dtype, grad.stride()) == (param.dtype, param.stride())
    return same and not grad.is_conj() and not grad.is_neg()


def _owners(taken: list[Tensor]) -> tuple[int, ...]:
    """How many references this function sees to the tensor in ``taken``, to its storage and to what
    torch shows of that to Python. Then how much else the storage holds, and whether its memory is
    torch's, not an array's or another process's.
    """
    storage = taken[0].untyped_storage()
    return (
        sys.getrefcount(taken[0]),
        storage_owners(storage),
        sys.getrefcount(storage),
        storage.nbytes() - taken[0].nbytes,
        storage.resizable() and not taken[0].is_shared(),
    )


_SOLE = _owners([torch.empty(1)])


def give_back_freed() -> None:
    """Let the system have what was freed, where the C library can (glibc).

    A model's tensors lie among objects that live on. What they leave behind is of no use to large
    buffers and would count twice.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
