"""Encoding: plain Python values as strict JSON and back, exactly.

JSON has no tuples, no NaN or infinity, no mappings with other keys than text, and no tensors.
Those become objects with one key that starts with ``$``::

    (0.9, 0.999)     {"$tuple": [0.9, 0.999]}
    float("inf")     {"$float": "inf"}
    {30: 0.1}        {"$dict": [[30, 0.1]]}
    a tensor         {"$tensor": "name"}, the tensor itself goes into a mapping beside the JSON

Finite floats are JSON numbers: Python writes the shortest decimal that reads back bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from dearmpi.errors import CheckpointError


def encode(value: Any, *, where: str, tensors: dict[str, Tensor] | None = None) -> Any:
    """Return ``value`` as JSON can hold it.

    where: a path such as ``groups/0/lr``, for messages and as the name of a tensor.
    tensors: receives tensors by name; None refuses them.
    Raises CheckpointError for a value that is no plain data.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, np.generic):
        return encode(value.item(), where=where, tensors=tensors)
    if isinstance(value, Tensor) and tensors is not None:
        return {"$tensor": _keep(value, where, tensors)}
    if isinstance(value, (list, tuple)):
        items = [encode(v, where=f"{where}/{i}", tensors=tensors) for i, v in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, tensors)
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold; "
        "use numbers, text, None, and tuples, lists or mappings of them",
        code="value-not-storable",
    )


def _keep(tensor: Tensor, where: str, tensors: dict[str, Tensor]) -> str:
    name = where
    while name in tensors:  # parameter names may contain slashes of their own
        name += "'"
    tensors[name] = tensor
    return name


def _encode_mapping(
    value: Mapping[Any, Any], where: str, tensors: dict[str, Tensor] | None
) -> dict[str, Any]:
    items = [
        (encode(k, where=where), encode(v, where=f"{where}/{k}", tensors=tensors))
        for k, v in value.items()
    ]
    if all(isinstance(k, str) and not k.startswith("$") for k in value):
        return dict(items)
    return {"$dict": [list(item) for item in items]}


def decode(value: Any, *, tensors: Mapping[str, Tensor]) -> Any:
    """Undo ``encode``; ``tensors`` are those it collected. Raises KeyError for an unknown name."""
    if isinstance(value, list):
        return [decode(item, tensors=tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [("$float", text)]:
            return float(text)
        case [("$tensor", name)]:
            return tensors[name]
        case [("$tuple", items)]:
            return tuple(decode(item, tensors=tensors) for item in items)
        case [("$dict", items)]:
            return {decode(k, tensors=tensors): decode(v, tensors=tensors) for k, v in items}
    return {key: decode(item, tensors=tensors) for key, item in value.items()}
