"""What an optimizer keeps on itself, beside its param groups and the state of each parameter."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dearmpi.engine.probe.trial import TrialBucket
from dearmpi.engine.update.update import clone
from dearmpi.torch_internals import version_of

_DEEPEST = 4  # containers in containers that are looked into


def picture_own_state(optimizer: Optimizer) -> dict[str, Any]:
    """By attribute, something that is another once its value has changed, also in place."""
    attributes = {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state")}
    common = {key: v for key, v in optimizer.state.items() if not isinstance(key, Tensor)}
    attributes |= {f"state[{key!r}]": value for key, value in common.items()}
    return {name: _picture(value) for name, value in attributes.items()}


def find_changed_attribute(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first attribute that two pictures show differently; empty if there is none."""
    return next((name for name in {**one, **other} if one.get(name) != other.get(name)), "")


def is_needed(optimizer: Optimizer, options: Mapping[str, Any], device: torch.device) -> bool:
    """Whether steps go on otherwise where what it keeps on itself is as it was made, as in new
    buckets, and not as the steps before have left it; a log or a cache makes no difference.
    """
    values = []
    for anew in (False, True):
        bucket = TrialBucket(torch.linspace(-1.0, 1.0, 16, device=device), [16], (4, 4))
        twin = clone(optimizer, [dict(options)], defaultdict(dict))
        for number in range(4):
            if anew and number == 2:
                kept = twin.state[bucket.members[0]]
                bucket = TrialBucket(bucket.values.clone(), [16], (4, 4))
                state = defaultdict(dict, {bucket.members[0]: kept})
                twin = clone(optimizer, twin.param_groups, state)
            bucket.train(twin, 1.0 + number)
        values.append(bucket.values)
    return not torch.equal(*values)


class _Object:
    """Equal to itself alone, and kept, so that no other gets its id."""

    __slots__ = ("_held",)

    def __init__(self, held: object) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self._held is other._held

    __hash__ = None  # type: ignore[assignment]


def _picture(value: Any, depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        return _Object(value), None if value.is_inference() else version_of(value)
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return value
    if isinstance(value, float):
        return repr(value)  # NaN equals NaN
    if depth < _DEEPEST and isinstance(value, Mapping):
        return [(_Object(key), _picture(item, depth + 1)) for key, item in value.items()]
    if depth < _DEEPEST and isinstance(value, (list, tuple, deque)):
        return [_picture(item, depth + 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return _Object(value), len(value)
    return _Object(value)
