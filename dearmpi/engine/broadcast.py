"""Rank 0's parameters and buffers on every rank."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from dearmpi.comm.world import World
from dearmpi.engine.buffers import flattened, is_dense
from dearmpi.engine.device import through_host


def broadcast_parameters(model: nn.Module, world: World, *, root: int = 0) -> None:
    """Overwrite every parameter of ``model`` with that of rank ``root`` (collective)."""
    _broadcast(model.parameters(), world, root)


def broadcast_buffers(model: nn.Module, world: World, *, root: int = 0) -> None:
    """Overwrite every buffer of ``model``, such as BatchNorm's statistics (collective)."""
    _broadcast(model.buffers(), world, root)


def _broadcast(tensors: Iterable[Tensor], world: World, root: int) -> None:
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        flat = flattened(tensor)
        through_host(flat, lambda host: world.broadcast(host, root))
        if not is_dense(tensor):
            tensor.detach().copy_(flat.view(tensor.shape))
