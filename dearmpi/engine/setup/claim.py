"""Claim: which engine a parameter belongs to, so that no second one takes it as well."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import ClassVar
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from dearmpi.errors import ConfigError


class _Process:
    """Claims last until they are released, or neither optimizer nor model refers to the engine."""

    engines: ClassVar[MutableMapping[Tensor, ReferenceType[object]]] = WeakTensorKeyDictionary()


def check_unclaimed(names: Mapping[nn.Parameter, str]) -> None:
    """Raise ConfigError if an engine in use has one of the parameters."""
    for param, name in names.items():
        engine = _Process.engines.get(param)
        if engine is not None and engine() is not None:
            raise ConfigError(
                f"parameter {name} belongs to another DistributedOptimizer, which is not closed; "
                "call close() on that one before making this one, or give each its own parameters",
                code="parameter-taken",
            )


def claim(names: Mapping[nn.Parameter, str], engine: object) -> None:
    """Mark the parameters as those of ``engine``, which is not kept alive by it."""
    for param in names:
        _Process.engines[param] = ref(engine)


def release(names: Mapping[nn.Parameter, str], engine: object) -> None:
    """Take the marks of ``engine`` off again; those of another that came after it stay."""
    for param in names:
        holder = _Process.engines.get(param)
        if holder is not None and holder() is engine:
            del _Process.engines[param]
