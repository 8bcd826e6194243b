"""The model's parameters and buffers: their names, descriptions to compare, and rank 0's values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dearmpi.comm.lifecycle import choose_world
from dearmpi.comm.messages.collective_calls import Gather, digest, first_difference
from dearmpi.comm.world import World
from dearmpi.device.accelerator import through_host
from dearmpi.engine.bucket.buffers import flattened, is_dense
from dearmpi.errors import ConfigError, MismatchError
from dearmpi.guessed import BROADCAST, answers_guesses
from dearmpi.torch_internals import buffer_table, parameter_table, sparse_parts

_HEAD_BYTES = 4096  # by which tensors drawn from different seeds differ already


def model_tensors(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Kind (``parameter`` or ``buffer``), name and tensor of each parameter and buffer, each once.

    Looked up past the tables that wait for gathers.
    """
    found: set[int] = set()
    for prefix, module in model.named_modules():
        for kind, table in (
            ("parameter", parameter_table(module)),
            ("buffer", buffer_table(module)),
        ):
            for key, tensor in _items(table):
                if tensor is not None and id(tensor) not in found:
                    found.add(id(tensor))
                    yield kind, f"{prefix}.{key}" if prefix else key, tensor


def describe(tensor: Tensor, *, note: str = "") -> str:
    """Shape, dtype, kind of device and order in memory, such as ``of shape (3, 4) (float32 on
    cpu)``; ``note`` stands behind them in the brackets.
    """
    if is_lazy(tensor):
        return f"without a shape yet ({type(tensor).__name__}{note})"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"of shape {tuple(tensor.shape)} ({dtype} on {tensor.device.type}{_form(tensor)}{note})"


def stored_parts(tensor: Tensor, name: str) -> list[Tensor]:
    """The dense tensors that hold the elements of ``tensor``, each element once.

    Raises ConfigError for a layout of which that is not known, and for a tensor without values.
    """
    if tensor.layout is torch.strided and tensor.is_contiguous():
        _refuse_without_values(tensor, name)
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor)
    if tensor.layout is torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout is not torch.strided:
        raise ConfigError(
            f"{name} has the layout {tensor.layout}, which cannot be sent to other ranks; "
            "keep it in a dense or a COO tensor",
            code="tensor-not-served",
        )
    _refuse_without_values(tensor, name)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:  # expanded
            tensor = tensor.narrow(dim, 0, 1)
    return [tensor]


def compare_tensors(
    lines: Sequence[str], gather: Gather, *, hosts: Sequence[str], what: str, cure: str
) -> None:
    """Raise MismatchError on all ranks unless all have the same ``lines``, with the first that
    differs (collective). ``what``: what they describe.
    """
    if len(set(gather(digest(lines)))) == 1:
        return
    seen = first_difference(lines, gather)
    rank = next(rank for rank, line in enumerate(seen) if line != seen[0])
    raise MismatchError(
        f"rank {rank} on {hosts[rank]} has other {what} than rank 0 on {hosts[0]}: {seen[rank]} "
        f"where rank 0 has {seen[0]}; {cure}",
        code="ranks-built-differently",
    )


def _refuse_without_values(tensor: Tensor, name: str) -> None:
    if tensor.is_meta:
        raise ConfigError(
            f"{name} is on the meta device and has no values to send; give it some first "
            "(model.to_empty(device=...) and its initialization, or a checkpoint)",
            code="tensor-without-values",
        )


def _form(tensor: Tensor) -> str:
    """What else makes the stored elements differ; empty for plain contiguous tensors."""
    if tensor.layout in (torch.sparse_coo, torch.sparse_csr):
        sizes = " and ".join(str(tuple(part.shape)) for part in stored_parts(tensor, ""))
        return f", {str(tensor.layout).removeprefix('torch.')} of tensors of shapes {sizes}"
    if tensor.layout is not torch.strided:
        return f", {str(tensor.layout).removeprefix('torch.')}"
    lazily = ", lazily conjugated or negated" if tensor.is_conj() or tensor.is_neg() else ""
    if tensor.is_contiguous() or not (is_dense(tensor) or 0 in tensor.stride()):
        return lazily
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return f", strides {tuple(stride if size > 1 else 1 for size, stride in dims)}{lazily}"


def _items(table: Any) -> Iterable[tuple[str, Tensor | None]]:
    items: Iterable[tuple[str, Tensor | None]]
    items = dict.items(table) if isinstance(table, dict) else table.items()  # that of a script
    return items


@answers_guesses("broadcast_parameters", BROADCAST)
def broadcast_parameters(model: nn.Module, world: World | None = None, *, root: int = 0) -> None:
    """Overwrite every parameter of ``model`` with that of rank ``root`` (collective).

    world: by default the one that this process was launched into. Between hosts, tensors whose
    bytes are the same on all ranks, by a hash, are not sent.

    Raises as ``broadcast_buffers`` does.
    """
    _check_model(model)
    world = choose_world(world)
    named = ((f"parameter {name}", param) for name, param in model.named_parameters())
    with world.named_call("dearmpi.broadcast_parameters()"):
        _broadcast(named, world, root, "parameters")


@answers_guesses("broadcast_buffers", BROADCAST)
def broadcast_buffers(model: nn.Module, world: World | None = None, *, root: int = 0) -> None:
    """Overwrite every buffer of ``model``, such as BatchNorm's statistics (collective).

    world: by default the one that this process was launched into. What is the same on all ranks is
    not sent, as by ``broadcast_parameters``.

    Raises MismatchError on all ranks, before anything is sent, where they have other buffers; and
    ConfigError for one without values, or in a layout that cannot be sent.
    """
    _check_model(model)
    world = choose_world(world)
    named = ((f"buffer {name}", buffer) for name, buffer in model.named_buffers())
    with world.named_call("dearmpi.broadcast_buffers()"):
        _broadcast(named, world, root, "buffers")


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the model is of type {type(model).__name__}, not Module; give the model itself, as "
            "in broadcast_parameters(model), and not its state_dict() or its parameters",
            code="wrong-type",
        )


def _broadcast(named: Iterable[tuple[str, Tensor]], world: World, root: int, what: str) -> None:
    if world.size == 1:
        return
    tensors = list(named)
    compare_tensors(
        [f"{name} {describe(tensor)}" for name, tensor in tensors],
        world.all_gather_text,
        hosts=world.hosts,
        what=what,
        cure=f"every rank must build the same model, with the same {what} in the same order",
    )
    # All ranks raise alike here, before the first is sent.
    parts = [part for name, tensor in tensors for part in _sendable_parts(tensor, name)]
    parts = [part for part in parts if part.numel()]
    # Within one host a copy takes no longer than its hash.
    for part in parts if len(set(world.hosts)) == 1 else _unequal(parts, world):
        _overwrite(part, world, root)


def _unequal(parts: Sequence[Tensor], world: World) -> list[Tensor]:
    """Those of ``parts`` whose bytes are not the same on all ranks (collective).

    Their heads are compared first, so that what differs there is not hashed whole.
    """
    differing: set[int] = set()
    for hash_of in (partial(_hash, limit=_HEAD_BYTES), _hash):
        rest = [index for index in range(len(parts)) if index not in differing]
        found = _differing([parts[index] for index in rest], hash_of, world)
        differing.update(rest[place] for place in found)
    return [part for index, part in enumerate(parts) if index in differing]


def _differing(
    parts: Sequence[Tensor], hash_of: Callable[[Tensor], str], world: World
) -> list[int]:
    """Places of ``parts`` whose hashes are not the same on all ranks (collective).

    Where all are, which is common, a single hash of each rank travels.
    """
    own = " ".join(map(hash_of, parts))
    if len(set(world.all_gather_text(hashlib.sha256(own.encode()).hexdigest()))) == 1:
        return []
    of_parts = zip(*(text.split() for text in world.all_gather_text(own)), strict=True)
    return [place for place, hashes in enumerate(of_parts) if len(set(hashes)) > 1]


def _hash(part: Tensor, *, limit: int | None = None) -> str:
    """Of the first ``limit`` bytes of what ``part`` stores, or of all."""
    flat = flattened(part).resolve_conj().resolve_neg()
    stored = flat.view(torch.uint8)[:limit].cpu()
    return hashlib.sha256(stored.numpy().data).hexdigest()


def _sendable_parts(tensor: Tensor, name: str) -> list[Tensor]:
    if is_lazy(tensor):
        raise ConfigError(
            f"{name} has no shape yet ({type(tensor).__name__}), as its module has seen no input; "
            "run one batch through the model on every rank first",
            code="tensor-without-values",
        )
    return stored_parts(tensor.detach(), name)


def _overwrite(part: Tensor, world: World, root: int) -> None:
    flat = flattened(part)
    through_host(flat, lambda host: world.broadcast(host, root))
    if not is_dense(part):
        part.copy_(flat.view(part.shape))
