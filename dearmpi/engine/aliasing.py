"""Aliasing: tensors of a model that share memory without being one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from torch import Tensor, nn

from dearmpi.errors import ConfigError


def check_apart(names: Mapping[nn.Parameter, str], model: nn.Module) -> None:
    """Raise ConfigError if one of the parameters ``names`` shares memory with another parameter or
    buffer of ``model``: who reads that would not wait for it, and where parameters are moved into
    buckets it would no longer follow.
    """
    tensors = chain(model.named_parameters(), model.named_buffers())
    spans = sorted(_spans(dict(tensors)))
    own = set(names.values())
    end, before = 0, ""
    for start, stop, name in spans:
        if start < end and (name in own or before in own):
            raise ConfigError(
                f"{before} and {name} share memory without being one parameter, so that a step on "
                "one of them would not be seen through the other; make them one Parameter "
                "(model.a.weight = model.b.weight), or give one a copy of the data (.clone())"
            )
        if stop > end:
            end, before = stop, name


def _spans(tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, int, str]]:
    """First and one-past-last address of each, but for those with gaps, in which others may lie."""
    for name, tensor in tensors.items():
        dims = zip(tensor.shape, tensor.stride(), strict=True) if tensor.numel() else ()
        extent = 1 + sum((size - 1) * stride for size, stride in dims)
        if tensor.data_ptr() and extent == tensor.numel():
            start = tensor.data_ptr()
            yield start, start + tensor.nbytes, name
