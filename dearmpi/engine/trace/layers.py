"""Layers: the modules of a model that own parameters, and the graph behind what they put out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from dearmpi.torch_internals import parameter_table


@dataclass(frozen=True, slots=True)
class Layer:
    """A module that owns parameters. params: those that get gradients and no other layer has."""

    name: str
    module: nn.Module
    params: tuple[nn.Parameter, ...]


def find_layers(model: nn.Module) -> Iterator[Layer]:
    """The layers of ``model``; tied parameters count with the first that has them, and scripts,
    which take no hooks, with none.
    """
    seen: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        own = [param for param in parameter_table(module).values() if param is not None]
        if own and not isinstance(module, torch.jit.ScriptModule):
            fresh = [param for param in own if param.requires_grad and param not in seen]
            yield Layer(name or type(module).__name__, module, tuple(dict.fromkeys(fresh)))
        seen.update(own)


def node_behind(values: Any) -> Node | None:
    """What made the first of the tensors in a module's input or output that has a graph."""
    if isinstance(values, Tensor):
        return values.grad_fn
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return None
    nodes = map(node_behind, values)
    return next((node for node in nodes if node is not None), None)
