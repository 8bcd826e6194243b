"""Rank 0's parameters and buffers on every rank."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dearmpi.comm.lifecycle import choose_world
from dearmpi.comm.world import World
from dearmpi.engine.bucket.buffers import flattened, is_dense
from dearmpi.engine.device.device import through_host
from dearmpi.engine.model.model_tensors import compare_tensors, describe, stored_parts
from dearmpi.errors import ConfigError
from dearmpi.guessed import BROADCAST, answers_guesses


@answers_guesses("broadcast_parameters", BROADCAST)
def broadcast_parameters(model: nn.Module, world: World | None = None, *, root: int = 0) -> None:
    """Overwrite every parameter of ``model`` with that of rank ``root`` (collective).

    world: by default the one that this process was launched into.

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

    world: by default the one that this process was launched into.

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
    for part in parts:
        if part.numel():
            _overwrite(part, world, root)


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
