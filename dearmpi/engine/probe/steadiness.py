"""Steadiness: what an optimizer's steps change besides parameters and their state.

- Entries of param groups, such as the step counts of schedule-free optimizers. Each bucket's step
  begins with the options of the moment, and its own counts are dropped. ``count`` takes a step of
  the whole optimizer on one made-up element of each group, which counts once for all buckets. That
  is right where no entry depends on parameters, gradients or state; ``require_steady`` finds out.
- Attributes of the optimizer itself, which would count the steps of each bucket.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from dearmpi.engine.probe.trial import (
    TrialBucket,
    device_of_optimizer,
    in_training,
    kinds_of_options,
    lively,
)
from dearmpi.engine.update.update import (
    Options,
    clone,
    read_options,
    step_on,
)
from dearmpi.errors import ConfigError
from dearmpi.torch_internals import version_of


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
    """Whether steps need what the optimizer keeps on itself: they go on otherwise where that is as
    it was made, as in new buckets. A log or a cache makes no difference.
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


def require_steady(optimizer: Optimizer) -> None:
    """Raise ConfigError unless steps change values, and leave the optimizer as it is but for the
    state of each parameter.

    Each bucket's step is given the groups of the wrapped optimizer. What it counts there is
    dropped, so it has to be what the engine counts once for all. What it counts on itself would
    count the steps of each bucket, and be lost where buckets change. Other checks see what fails.
    """
    name = type(optimizer).__name__
    for options in kinds_of_options(optimizer):
        try:
            seen = _follow_steps(optimizer, options)
        except Exception:
            continue
        _require_changes(name, seen)
        if key := _adapted_option(optimizer, seen):
            raise ConfigError(
                f"{name} changes {key!r} of its param groups by what it finds in the parameters, "
                "gradients or state of all buckets together. Each bucket is updated by itself, "
                "and would find another; train it on one rank, or use AdamW or "
                "schedulefree.AdamWScheduleFree: they keep what they find in each parameter's "
                "state, and count only steps in their groups",
                code="optimizer-couples-buckets",
            )
        for later in seen.own[1:]:  # the first step may find out something, once for all
            changed = find_changed_attribute(seen.own[0], later)
            if changed and is_needed(optimizer, lively(options), device_of_optimizer(optimizer)):
                raise ConfigError(
                    f"{name} keeps {changed!r} on itself and changes it with its steps, of which "
                    "it takes one for each bucket: it would not count on; use a version that keeps "
                    "it in the state of each parameter",
                    code="optimizer-couples-buckets",
                )


def _require_changes(name: str, seen: _Seen) -> None:
    if seen.is_moved:
        raise ConfigError(
            f"{name} gives tensors other memory in its step (p.data = ... does that), which does "
            "not reach the model, whose parameters are views of a bucket; change values in place, "
            "as p.data.copy_(...) does",
            code="optimizer-moves-parameters",
        )
    if not seen.is_changed:
        raise ConfigError(
            f"a trial step of {name} changes nothing: it seems to pass its work on, to another "
            "optimizer or to a later step, and buckets are updated each by itself; wrap the "
            "optimizer inside, and have the outer one step this DistributedOptimizer: after that "
            "p.grad is None, and optimizer.synchronize() goes before any reading or writing of "
            "parameters. Or it leaves out what is no nn.Parameter, as pieces of buckets are none; "
            "let it ask for p.requires_grad",
            code="optimizer-changes-nothing",
        )


class _Seen(NamedTuple):
    """What three steps of a clone on made-up values have shown.

    is_moved, is_changed: whether the tensor has left its memory, and the values there are others.
    options: those before and after each step. own: what the clone keeps on itself after each, and
    after one on other values.
    """

    is_moved: bool
    is_changed: bool
    options: list[dict[str, Any]]
    own: list[dict[str, Any]]


def _follow_steps(optimizer: Optimizer, options: Mapping[str, Any]) -> _Seen:
    values = torch.linspace(-1.0, 1.0, 16, device=device_of_optimizer(optimizer))
    begun = (values.clone(), values.flip(0))
    bucket, other = (TrialBucket(buffer, [16], (4, 4)) for buffer in begun)
    twin = clone(optimizer, [lively(options)], defaultdict(dict))
    seen, own = [read_options(twin)[0]], []
    for number in range(3):
        bucket.train(twin, 1.0 + number)
        seen.append(read_options(twin)[0])
        own.append(picture_own_state(twin))
    twin.param_groups = [lively(options)]
    other.train(twin, 1.0)
    own.append(picture_own_state(twin))
    return _Seen(bucket.is_moved(), not torch.equal(bucket.values, values), seen, own)


def adapts_its_groups(optimizer: Optimizer) -> bool:
    """Whether steps change options of param groups by the parameters, gradients or state that they
    meet, as Prodigy's do. Such an optimizer has to see all of them at once.
    """
    for options in kinds_of_options(optimizer):
        try:
            seen = _follow_steps(optimizer, options)
        except Exception:
            continue
        if _adapted_option(optimizer, seen):
            return True
    return False


def _adapted_option(optimizer: Optimizer, seen: _Seen) -> str | None:
    """The first option that steps go on to change, if it is not what the engine counts."""
    before, *after = seen.options
    begun = {**after[0], **before}  # a step may add defaults, once for all
    if not any(changed_option(begun, later) for later in after):
        return None
    return uncounted_option(optimizer, seen.options)
