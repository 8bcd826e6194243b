"""Precision: the number format in which the model computes."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dearmpi.train.settings.choices import Precision


def convert_model(model: nn.Module, precision: Precision) -> None:
    """Give the model's parameters the dtype they are trained in: fp64, or as they are."""
    if precision == "fp64":
        model.double()


def convert_batch(batch: Any, precision: Precision) -> Any:
    """The batch with its floating-point tensors in fp64, if that is what the model computes in."""
    if precision != "fp64":
        return batch
    return _map(batch, lambda part: part.double() if part.is_floating_point() else part)


def device_of_model(model: nn.Module) -> torch.device:
    """Where the model's parameters are; the host for a model without any.

    Between two steps this waits for a parameter to be current, as any look at one does.
    """
    return next((param.device for param in model.parameters()), torch.device("cpu"))


def send_batch(batch: Any, device: torch.device) -> Any:
    """The batch on ``device``."""
    return batch if device.type == "cpu" else _map(batch, lambda part: part.to(device))


def _map(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with each of its tensors changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return _map_mapping(batch, change)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(part, change) for part in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_map(part, change) for part in batch)
    return batch


def _map_mapping(batch: Mapping[Any, Any], change: Callable[[Tensor], Tensor]) -> Any:
    parts = {name: _map(part, change) for name, part in batch.items()}
    if not isinstance(batch, UserDict):  # of other kinds a copy may hold the same items
        return parts
    changed = copy.copy(batch)  # a tokenizer's has attributes beside its items
    changed.update(parts)
    return changed


def computing(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """The context of a feed-forward on ``device``: autocast to bf16, or nothing."""
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
