"""Joining: what a rank without batches does while others still train.

It takes part in every collective with zero gradients. Its own learning-rate scheduler no longer
runs, so it takes the hyperparameters of each step from the ranks that still train: those send
theirs, a joined rank sends minus infinity, and the maximum is what the step uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dearmpi.engine.update import Options


def pack(options: Options, *, joined: bool) -> Tensor:
    """All numbers among the hyperparameters, in a fixed order, in fp64."""
    values = [value for group in options for _, value in _numbers(group)]
    sent = [-math.inf] * len(values) if joined else values
    return torch.tensor(sent, dtype=torch.float64, device="cpu")


def unpack(options: Options, packed: Tensor) -> list[dict[str, Any]]:
    """``options`` with the numbers replaced by those in ``packed``."""
    values = iter(packed.tolist())
    return [_with_numbers(group, values) for group in options]


def _numbers(group: Any) -> Iterator[tuple[Any, float]]:
    """Key and value of every number in a group, those in pairs and 0-d tensors included."""
    for key, value in group.items():
        for number in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(number, (bool, int, float)) or _is_scalar(number):
                yield key, float(number)


def _with_numbers(group: Any, values: Iterator[float]) -> dict[str, Any]:
    replaced: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, (tuple, list)):
            replaced[key] = type(value)(_replace(number, values) for number in value)
        else:
            replaced[key] = _replace(value, values)
    return replaced


def _replace(value: Any, values: Iterator[float]) -> Any:
    if isinstance(value, (bool, int, float)):
        return type(value)(next(values))
    if _is_scalar(value):
        return torch.full_like(value, next(values))
    return value


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0
