"""Counting: entries of param groups that an optimizer's steps change, such as schedule-free's.

Each bucket's step counts from the options of the moment, and what it counts there is dropped.
A step of the whole optimizer on one made-up element of each group counts once for all buckets.
That is right where no entry depends on parameters, gradients or state, which a trial finds out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dearmpi.engine.probe.trial import device_of_optimizer, in_training
from dearmpi.engine.update.update import Options, clone, read_options, step_on


def count(optimizer: Optimizer, options: Options) -> list[dict[str, Any]]:
    """The options of all groups after a step with ``options``."""
    device = device_of_optimizer(optimizer)
    members = {}
    for number in range(len(options)):
        element = torch.ones(1, device=device)
        element.grad = torch.ones_like(element)
        members[number] = [element]
    twin = clone(optimizer, [], defaultdict(dict))
    with torch.no_grad():
        step_on(twin, options, members)
    return read_options(twin)


def counts(optimizer: Optimizer) -> bool:
    """Whether steps go on to change options. Those that a first step adds once for all do not."""
    try:
        first = count(optimizer, [in_training(optimizer, g) for g in read_options(optimizer)])
        return first != count(optimizer, first)
    except Exception:  # such as tensors that have no one truth value; others refuse what fails
        return False


def uncounted_option(optimizer: Optimizer, seen: Sequence[Mapping[str, Any]]) -> str | None:
    """The first option that trial steps, which have ``seen`` these options of a group, have changed
    otherwise than ``count`` does; None if there is none.
    """
    for before, after in zip(seen, seen[1:], strict=False):
        if (changed := changed_option(before, after)) is None:
            continue
        try:
            counted = count(optimizer, [before])[0]
        except Exception:  # it needs more than an element
            return changed
        if (key := changed_option(after, counted)) is not None:
            return key
    return None


def changed_option(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first option of ``one`` or ``other`` that differs; None if none does."""
    keys = {**other, **one}
    return next((key for key in keys if not _is_same(one.get(key), other.get(key))), None)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)
