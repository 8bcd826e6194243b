"""What an optimizer can be asked to do, found out by trial steps on made-up values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from dearmpi.engine.probe.counting import changed_option, uncounted_option
from dearmpi.engine.probe.own_state import find_changed_attribute, is_needed, picture_own_state
from dearmpi.engine.probe.trial import (
    TrialBucket,
    are_alike,
    device_of_optimizer,
    first_state,
    kinds_of_options,
    lively,
    try_steps,
)
from dearmpi.engine.update.update import clone, is_elementwise_tensor, on_host, read_options
from dearmpi.errors import ConfigError


def require_host(optimizer: Optimizer) -> None:
    """Raise ConfigError unless the optimizer can update tensors in host memory."""
    twin = host_twin(optimizer)
    for options in kinds_of_options(twin):
        try:
            try_steps(twin, options, [16])
        except Exception as error:
            raise ConfigError(
                f"update_on is 'host', but a trial step of {type(optimizer).__name__} on tensors "
                f"in host memory failed: {error}; choose an optimizer and options that work there, "
                "or leave update_on out",
                code="trial-step-failed",
            ) from error


def host_twin(optimizer: Optimizer) -> Optimizer:
    """One like ``optimizer`` to try in its place: all that it has is in host memory."""
    placeholder = {"params": [torch.zeros(1, device="cpu")]}
    groups = [{**on_host(group), **placeholder} for group in optimizer.param_groups]
    return clone(optimizer, groups, defaultdict(dict))


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
                "gradients or state of all buckets together, but each bucket is updated by "
                "itself, and would find another; train it on one rank, or on several use an "
                "optimizer that keeps what it finds in the state of each parameter, or counts "
                "steps alone in its groups, such as AdamW or schedulefree.AdamWScheduleFree",
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
    meet, as Prodigy's do, so that it has to see all of them at once.
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


def require_separable(optimizer: Optimizer) -> None:
    """Raise ConfigError unless updating parameters in several calls gives the same numbers."""
    name = type(optimizer).__name__
    for options in kinds_of_options(optimizer):
        try:
            together = try_steps(optimizer, options, [16, 16], shape=(4, 4))
            apart = try_steps(optimizer, options, [16, 16], shape=(4, 4), apart=True)
        except Exception as error:
            needed = (
                "an optimizer whose step() takes no closure"
                if "closure" in str(error)
                else "an optimizer, and options, that update tensors by dense gradients"
            )
            raise ConfigError(
                f"{name} cannot run bucket by bucket (a trial step failed: {error}); it needs "
                f"{needed}",
                code="trial-step-failed",
            ) from error
        if not are_alike(together, apart):
            raise ConfigError(
                f"{name} couples all parameters in one step, so it cannot run bucket by bucket",
                code="optimizer-couples-buckets",
            )


def require_copied_gradients(optimizer: Optimizer) -> None:
    """Raise ConfigError if later steps look at ``p.grad`` itself, and not at a copy.

    The next backprop has written into it by then. In plain torch it has a tensor of its own, once
    ``zero_grad()`` has dropped this one.
    """
    for options in kinds_of_options(optimizer):
        filled, anew = (
            try_steps(optimizer, options, [16], shape=(4, 4), anew=anew) for anew in (False, True)
        )
        if not are_alike(filled, anew):
            raise ConfigError(
                f"{type(optimizer).__name__} keeps p.grad itself for a later step, but by then "
                "the next backprop has written into it; keep p.grad.clone()",
                code="optimizer-keeps-gradient",
            )


def require_half(optimizer: Optimizer, dtypes: Iterable[torch.dtype], *, whole: bool) -> None:
    """Raise ConfigError unless the optimizer can update tensors of ``dtypes``.

    whole: it is given whole tensors, and not 1-D pieces of them.
    """
    for dtype in dtypes:
        for options in kinds_of_options(optimizer):
            try:
                try_steps(optimizer, options, [16], shape=(4, 4) if whole else None, dtype=dtype)
            except Exception as error:
                raise ConfigError(
                    f"{type(optimizer).__name__} cannot update parameters of {dtype} (a trial step "
                    f"failed: {error}); set master_weights=True, which gives it copies in fp32, or "
                    "keep the parameters in fp32",
                    code="trial-step-failed",
                ) from error


def elementwise_keys(optimizer: Optimizer, *, whole: bool) -> frozenset[str]:
    """Names of the state entries that have one value per element of a parameter.

    Of a parameter that is a scalar, shapes alone do not tell them from counters such as ``step``.
    whole: the optimizer is given whole tensors; then only groups with a scalar are looked at, as
    others may be for matrices alone.
    """
    keys: set[str] = set()
    for group in optimizer.param_groups:
        if not whole or any(param.dim() == 0 for param in group["params"]):
            param, state = first_state(optimizer, group, (3,))
            keys.update(key for key, value in state.items() if is_elementwise_tensor(value, param))
    return frozenset(keys)


def resident_scalars(optimizer: Optimizer) -> tuple[frozenset[str], ...]:
    """By group, names of the scalar state entries that lie on the parameters' device.

    Most optimizers count their steps on the host; those that run fused, or that CUDA graphs can
    capture, do so on the device, and work nowhere else. On the host there is nothing to tell.
    """
    if device_of_optimizer(optimizer).type == "cpu":
        return tuple(frozenset() for _ in optimizer.param_groups)
    with torch.device("cpu"):  # as on the driving thread, where no default of the user's holds
        return tuple(_resident_scalars_of(optimizer, group) for group in optimizer.param_groups)


def _resident_scalars_of(optimizer: Optimizer, group: Mapping[str, Any]) -> frozenset[str]:
    dims = {max(1, param.dim()) for param in group["params"]} or {1}  # Muon takes matrices alone
    states = [first_state(optimizer, group, (3,) * num) for num in sorted(dims)]
    return frozenset(
        key
        for param, state in states
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() == 0 and value.device == param.device
    )
