"""Gradient memory: where a bucket's gradients lie in an iteration."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from dearmpi.engine.bucket.buffers import Arena, FlatBuffer, flattened, is_dense
from dearmpi.plan.data.layout import Bucket
from dearmpi.torch_internals import storage_owners

_LEAST_BYTES = 1 << 20  # to copy less takes no longer than to look whether it can be adopted


class GradientMemory:
    """A flat buffer of the bucket's own, made when the first gradient is expected; or what autograd
    has written a gradient to that is all of the bucket, adopted until ``give_up``.

    To adopt saves a copy, and memory: of a tied embedding autograd makes two gradients, beside
    which a buffer would lie unused. Only on the host, where nothing that is freed is still queued
    to be read; and only what nobody else has, who would find sums over ranks in it.

    made: the buffer of the bucket's own, if there is one by now.
    """

    def __init__(self, spec: Bucket, params: Sequence[Tensor], *, rank: int, arena: Arena) -> None:
        self._spec, self._params, self._rank, self._arena = spec, params, rank, arena
        self.made: FlatBuffer | None = None
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
            data = self._arena.take(self._spec, likes[0])
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
        """Nobody needs this iteration's gradients any more."""
        self._adopted = None


def _is_stored_as(grad: Tensor, param: Tensor) -> bool:
    """Whether element by element, in the same order, and none of them to be read as another."""
    same = (grad.dtype, grad.stride()) == (param.dtype, param.stride())
    return same and not grad.is_conj() and not grad.is_neg()


def _owners(taken: list[Tensor]) -> tuple[int, ...]:
    """How many references there are to the tensor in ``taken``, to its storage and to what torch
    shows of that to Python, as this function sees them; how much else the storage holds; and
    whether its memory is torch's, not an array's or another process's.
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
