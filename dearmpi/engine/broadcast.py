"""Rank 0's parameters and buffers on every rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dearmpi.comm.world import World
from dearmpi.engine.buffers import flattened, is_dense
from dearmpi.engine.device import through_host
from dearmpi.errors import ConfigError, MismatchError


def broadcast_parameters(model: nn.Module, world: World, *, root: int = 0) -> None:
    """Overwrite every parameter of ``model`` with that of rank ``root`` (collective).

    Raises as ``broadcast_buffers`` does.
    """
    named = ((f"parameter {name}", param) for name, param in model.named_parameters())
    with world.named_call("dearmpi.broadcast_parameters()"):
        _broadcast(named, world, root)


def broadcast_buffers(model: nn.Module, world: World, *, root: int = 0) -> None:
    """Overwrite every buffer of ``model``, such as BatchNorm's statistics (collective).

    Raises ConfigError for one in a layout that cannot be sent, and MismatchError for a sparse one
    of which ranks hold different numbers of elements.
    """
    named = ((f"buffer {name}", buffer) for name, buffer in model.named_buffers())
    with world.named_call("dearmpi.broadcast_buffers()"):
        _broadcast(named, world, root)


def stored_parts(tensor: Tensor, name: str) -> list[Tensor]:
    """The dense tensors that hold the elements of ``tensor``, each element once.

    Raises ConfigError for a layout of which that is not known.
    """
    if tensor.layout is torch.strided and tensor.is_contiguous():
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout is torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout is not torch.strided:
        raise ConfigError(
            f"{name} has the layout {tensor.layout}, which cannot be sent to other ranks; "
            "keep it in a dense or a COO tensor"
        )
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:  # expanded
            tensor = tensor.narrow(dim, 0, 1)
    return [tensor]


def _compare_sizes(parts: Iterable[Tensor], name: str, world: World) -> None:
    told = world.all_gather_text(" and ".join(str(tuple(part.shape)) for part in parts))
    for rank, other in enumerate(told):
        if other != told[0]:
            raise MismatchError(
                f"rank {rank} has another sparse {name} than rank 0, with tensors of shapes "
                f"{other} against {told[0]}; every rank must build the same"
            )


def _broadcast(named: Iterable[tuple[str, Tensor]], world: World, root: int) -> None:
    for name, tensor in named if world.size > 1 else ():
        parts = stored_parts(tensor.detach(), name)
        if tensor.layout is not torch.strided:
            _compare_sizes(parts, name, world)
        for part in parts:
            if part.numel():
                _overwrite(part, world, root)


def _overwrite(part: Tensor, world: World, root: int) -> None:
    flat = flattened(part)
    through_host(flat, lambda host: world.broadcast(host, root))
    if not is_dense(part):
        part.copy_(flat.view(part.shape))
