"""Extra states: what a script saves besides model and optimizer, its tensors apart.

A checkpoint keeps plain data in its manifest and tensors in its parts. So the tensors of a state,
such as those of a moving average, are saved among the model's, under names that no model has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

PREFIX = "@states/"
_TENSOR = "@tensor"


def pack(name: str, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state called ``name`` as plain data with a mark for each tensor, and the tensors."""
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value.detach()
            return {_TENSOR: path}
        if isinstance(value, Mapping):
            return {key: walk(part, f"{path}/{key}") for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            parts = (walk(part, f"{path}/{place}") for place, part in enumerate(value))
            return type(value)(parts) if type(value) in (list, tuple) else tuple(parts)
        return value

    return walk(state, f"{PREFIX}{name}"), tensors


def unpack(plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state that ``pack`` has taken apart."""

    def walk(value: Any) -> Any:
        if isinstance(value, Mapping):
            if value.keys() == {_TENSOR}:
                return tensors[value[_TENSOR]]
            return {key: walk(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(walk(part) for part in value)
        return value

    return {key: walk(part) for key, part in plain.items()}


def split(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's tensors of a checkpoint, and those of extra states."""
    model = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
    return model, {n: tensor for n, tensor in tensors.items() if n.startswith(PREFIX)}
