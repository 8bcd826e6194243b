"""Blocks: the repeated parts of a model, such as transformer layers, compiled or checkpointed one
by one. So the engine still works between two of them, and waits for each by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dearmpi.errors import TaskError
from dearmpi.train.settings.settings import RunSettings

BACKEND = "inductor"  # of torch.compile


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Modules that a ModuleList or Sequential of ``model`` holds two of, of one class with modules
    and parameters inside. Blocks inside a block are not counted.
    """
    blocks: dict[nn.Module, None] = {}

    def walk(module: nn.Module) -> None:
        is_container = isinstance(module, (nn.ModuleList, nn.Sequential))
        kinds = Counter(type(child) for child in module.children() if _has_parts(child))
        for child in module.children():
            if is_container and kinds[type(child)] > 1 and any(True for _ in child.parameters()):
                blocks[child] = None
            else:
                walk(child)

    walk(model)
    return list(blocks)


def _has_parts(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def prepare_blocks(model: nn.Module, settings: RunSettings) -> None:
    """Compile the blocks of ``model``, or have backprop compute their inside again, as ``settings``
    choose. Raises TaskError for a model without blocks.
    """
    chosen = [name for name in ("compile", "activation_checkpointing") if getattr(settings, name)]
    if not chosen:
        return
    blocks = find_blocks(model)
    if not blocks:
        raise TaskError(
            f"{' and '.join(chosen)} has no effect: no ModuleList or Sequential of the model holds "
            "two modules of one class that have modules inside; leave it out, or put the model's "
            "repeated layers into a ModuleList",
            code="setting-without-effect",
        )
    for block in blocks:
        if settings.activation_checkpointing:
            kind: Any = type(block)
            block.__class__ = _checkpointed(kind)
        if settings.compile:
            block.compile(backend=BACKEND)


@cache
def _checkpointed(kind: Any) -> type[nn.Module]:
    """``kind`` with a forward that keeps its inputs alone. A class, since the engine and torch's
    compiler tell blocks by the forward of their class.
    """
    parts: dict[str, Any] = {"forward": _forward, "plain_forward": kind.forward}
    parts["__module__"] = kind.__module__
    made: type[nn.Module] = type(kind.__name__, (kind,), parts)
    return made


def _forward(self: Any, *arguments: Any, **named: Any) -> Any:
    plain: Callable[..., Any] = self.plain_forward
    if not torch.is_grad_enabled():
        return plain(*arguments, **named)
    return checkpoint(plain, *arguments, use_reentrant=False, **named)
