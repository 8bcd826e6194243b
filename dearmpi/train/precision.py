"""Precision: in which numbers the model computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dearmpi.train.settings import Precision


def convert_model(model: nn.Module, precision: Precision) -> None:
    """Give the model's parameters the dtype they are trained in: fp64, or as they are."""
    if precision == "fp64":
        model.double()


def convert_batch(batch: Any, precision: Precision) -> Any:
    """The batch with its floating-point tensors in fp64, if that is what the model computes in."""
    if precision != "fp64":
        return batch
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {name: convert_batch(part, precision) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(convert_batch(part, precision) for part in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(convert_batch(part, precision) for part in batch)
    return batch


def computing(model: nn.Module, precision: Precision) -> AbstractContextManager[Any]:
    """The context of a feed-forward: autocast to bf16, or nothing."""
    if precision != "bf16":
        return nullcontext()
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return torch.autocast(device, dtype=torch.bfloat16)
