"""Aliasing: tensors of a model that share memory without being one."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dearmpi.engine.model.model_tensors import model_tensors
from dearmpi.errors import ConfigError


def check_apart(params: Container[nn.Parameter], model: nn.Module) -> None:
    """Raise ConfigError if one of ``params`` shares memory with another parameter or buffer of
    ``model``: who reads that would not wait for it, and where parameters are moved into buckets it
    would no longer follow. Waits for no gathers: where parameters lie is known.
    """
    end, before, is_own_before = 0, "", False
    for start, stop, name, is_own in sorted(_spans(params, model)):
        if start < end and (is_own or is_own_before):
            raise ConfigError(
                f"{before} and {name} share memory without being one parameter, so that a step on "
                "one of them would not be seen through the other; make them one Parameter "
                "(model.a.weight = model.b.weight), or give one a copy of the data (.clone())",
                code="parameters-share-memory",
            )
        if stop > end:
            end, before, is_own_before = stop, name, is_own


def check_private(params: Mapping[nn.Parameter, str]) -> None:
    """Raise ConfigError for memory that other processes see: parameters would move out of it."""
    for param, name in params.items():
        if param.device.type == "cpu" and param.is_shared():
            raise ConfigError(
                f"parameter {name} is in memory that is shared with other processes "
                "(share_memory()) or mapped from a file, which would no longer see it, as it moves "
                "into a bucket; use gather='gradients', which leaves parameters where they are, or "
                "give the model memory of its own (param.data = param.data.clone())",
                code="parameters-share-memory",
            )


def _spans(
    params: Container[nn.Parameter], model: nn.Module
) -> Iterator[tuple[int, int, str, bool]]:
    """First and one-past-last address of each tensor, its name, and whether it is of ``params``;
    not of those with gaps, in which others may lie, nor of sparse ones and those without a shape.
    """
    for _, name, tensor in model_tensors(model):
        if is_lazy(tensor) or tensor.layout is not torch.strided:
            continue
        dims = zip(tensor.shape, tensor.stride(), strict=True) if tensor.numel() else ()
        extent = 1 + sum((size - 1) * stride for size, stride in dims)
        if tensor.data_ptr() and extent == tensor.numel():
            start = tensor.data_ptr()
            yield start, start + tensor.nbytes, name, tensor in params
