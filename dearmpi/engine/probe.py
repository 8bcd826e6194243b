"""What an optimizer can be asked to do, found out by trial steps on made-up values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.engine.own_state import find_changed, is_needed, picture_own_state
from dearmpi.engine.update import clone, is_elementwise_tensor, on_host, read_options
from dearmpi.errors import ConfigError

_LEAST_RATE = 1e-2  # of trial steps: a schedule may begin at 0, where any two steps are alike
_SCALES = (1e-3, 1.0, 1e3)  # of made-up gradients: an optimizer may clip those beyond a threshold


def require_host(optimizer: Optimizer) -> None:
    """Raise ConfigError unless the optimizer can update tensors in host memory."""
    twin = host_twin(optimizer)
    for options in _kinds_of_options(twin):
        try:
            _try_steps(twin, options, [16])
        except Exception as error:
            raise ConfigError(
                f"update_on is 'host', but a trial step of {type(optimizer).__name__} on tensors "
                f"in host memory failed: {error}; choose an optimizer and options that work there, "
                "or leave update_on out"
            ) from error


def host_twin(optimizer: Optimizer) -> Optimizer:
    """One like ``optimizer`` to try in its place: all that it has is in host memory."""
    placeholder = {"params": [torch.zeros(1, device="cpu")]}
    groups = [{**on_host(group), **placeholder} for group in optimizer.param_groups]
    return clone(optimizer, groups, defaultdict(dict))


def require_steady(optimizer: Optimizer) -> None:
    """Raise ConfigError unless steps change values, and leave the optimizer as it is but for the
    state of each parameter.

    Each bucket's step is given the groups of the wrapped optimizer: what it counts there would
    begin anew in every step. What it counts on itself would count the steps of each bucket, and be
    lost where buckets change. What fails altogether is left to others to tell.
    """
    name = type(optimizer).__name__
    for options in _kinds_of_options(optimizer):
        try:
            values, seen, own = _follow_steps(optimizer, options)
        except Exception:
            continue
        if torch.equal(*values):
            raise ConfigError(
                f"a trial step of {name} changes nothing: it seems to pass its work on, to another "
                "optimizer or to a later step, and buckets are updated each by itself; wrap the "
                "optimizer inside"
            )
        for key, value in {**seen[1], **seen[0]}.items():  # a step may add defaults, once for all
            if any(not _is_same(value, later.get(key)) for later in seen[1:]):
                raise ConfigError(
                    f"{name} changes {key!r} of its param groups with each step, and buckets are "
                    "updated each by itself, with the options of the moment: it would not count "
                    "on; use a version that keeps it in the state of each parameter"
                )
        for later in own[1:]:  # the first step may find out something, once for all
            changed = find_changed(own[0], later)
            if changed and is_needed(optimizer, _lively(options), _device_of(optimizer)):
                raise ConfigError(
                    f"{name} keeps {changed!r} on itself and changes it with its steps, of which "
                    "it takes one for each bucket: it would not count on; use a version that keeps "
                    "it in the state of each parameter"
                )


def _follow_steps(
    optimizer: Optimizer, options: Mapping[str, Any]
) -> tuple[tuple[Tensor, Tensor], list[dict[str, Any]], list[dict[str, Any]]]:
    """Made-up values before and after three steps of a clone; its options before and after each;
    what it keeps on itself after each, and after one on other values.
    """
    device = _device_of(optimizer)
    param = nn.Parameter(torch.linspace(-1.0, 1.0, 16, device=device).view(4, 4))
    before = param.detach().clone()
    twin = clone(optimizer, [{**_lively(options), "params": [param]}], defaultdict(dict))
    seen, own = [read_options(twin)[0]], []
    for number in range(3):
        param.grad = torch.full_like(param, 1.0 + number)
        twin.step()
        seen.append(read_options(twin)[0])
        own.append(picture_own_state(twin))
    other = nn.Parameter(before.flip(0))
    other.grad = torch.ones_like(other)
    twin.param_groups = [{**_lively(options), "params": [other]}]
    twin.step()
    return (before, param.detach()), seen, [*own, picture_own_state(twin)]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)


def require_elementwise(optimizer: Optimizer) -> None:
    """Raise ConfigError unless the optimizer treats every element by itself.

    Found out by trial: three steps on a small matrix must give the same numbers as three steps on
    two pieces of it, which is what sharding makes of a parameter. Options may change what an
    optimizer does, so every kind of parameter group is tried.
    """
    for options in _kinds_of_options(optimizer):
        try:
            whole = _try_steps(optimizer, options, [24])
            pieces = _try_steps(optimizer, options, [9, 15])
        except Exception as error:
            require_separable(optimizer)
            raise ConfigError(
                f"{type(optimizer).__name__} cannot be sharded (a trial step failed: {error}); use "
                "gather='gradients'"
            ) from error
        matrix = _try_steps(optimizer, options, [24], shape=(6, 4))
        if not (_are_alike(whole, pieces) and _are_alike(whole, matrix)):
            raise ConfigError(
                f"{type(optimizer).__name__} does not treat every element by itself, so it needs "
                "whole tensors: use gather='gradients'"
            )


def require_separable(optimizer: Optimizer) -> None:
    """Raise ConfigError unless updating parameters in several calls gives the same numbers."""
    name = type(optimizer).__name__
    for options in _kinds_of_options(optimizer):
        try:
            together = _try_steps(optimizer, options, [16, 16], shape=(4, 4))
            apart = _try_steps(optimizer, options, [16, 16], shape=(4, 4), apart=True)
        except Exception as error:
            needed = (
                "an optimizer whose step() takes no closure"
                if "closure" in str(error)
                else "an optimizer, and options, that update tensors by dense gradients"
            )
            raise ConfigError(
                f"{name} cannot run bucket by bucket (a trial step failed: {error}); it needs "
                f"{needed}"
            ) from error
        if not _are_alike(together, apart):
            raise ConfigError(
                f"{name} couples all parameters in one step, so it cannot run bucket by bucket"
            )


def require_half(optimizer: Optimizer, dtypes: Iterable[torch.dtype], *, whole: bool) -> None:
    """Raise ConfigError unless the optimizer can update tensors of ``dtypes``.

    whole: it is given whole tensors, and not 1-D pieces of them.
    """
    for dtype in dtypes:
        for options in _kinds_of_options(optimizer):
            try:
                _try_steps(optimizer, options, [16], shape=(4, 4) if whole else None, dtype=dtype)
            except Exception as error:
                raise ConfigError(
                    f"{type(optimizer).__name__} cannot update parameters of {dtype} (a trial step "
                    f"failed: {error}); set master_weights=True, which gives it copies in fp32, or "
                    "keep the parameters in fp32"
                ) from error


def elementwise_keys(optimizer: Optimizer) -> frozenset[str]:
    """Names of the state entries that have one value per element of a parameter.

    Of a parameter that is a scalar, shapes alone do not tell them from counters such as ``step``.
    """
    keys: set[str] = set()
    for param, state in _first_states(optimizer):
        keys.update(key for key, value in state.items() if is_elementwise_tensor(value, param))
    return frozenset(keys)


def resident_scalars(optimizer: Optimizer) -> tuple[frozenset[str], ...]:
    """By group, names of the scalar state entries that lie on the parameters' device.

    Most optimizers count their steps on the host; those that run fused, or that CUDA graphs can
    capture, do so on the device, and work nowhere else. On the host there is nothing to tell.
    """
    if _device_of(optimizer).type == "cpu":
        return tuple(frozenset() for _ in optimizer.param_groups)
    with torch.device("cpu"):  # as on the driving thread, where no default of the user's holds
        return tuple(
            frozenset(
                key
                for key, value in state.items()
                if isinstance(value, Tensor) and value.dim() == 0 and value.device == param.device
            )
            for param, state in _first_states(optimizer)
        )


def _first_states(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, Mapping[str, Any]]]:
    """Of each group: a made-up parameter of three elements, and its state after a step."""
    device = _device_of(optimizer)
    for group in optimizer.param_groups:
        param = nn.Parameter(torch.zeros(3, device=device))
        param.grad = torch.ones(3, device=device)
        twin = clone(optimizer, [{**group, "params": [param]}], defaultdict(dict))
        twin.step()
        yield param, twin.state[param]


def _device_of(optimizer: Optimizer) -> torch.device:
    """Where the parameters are: some options are for devices only."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    first = next(params, None)
    return torch.device("cpu") if first is None else first.device


def _kinds_of_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of parameter groups, without those that differ in rates alone."""
    kinds: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        kind = {
            key: bool(value) if isinstance(value, float) else value
            for key, value in options.items()
            if not isinstance(value, Tensor)
        }
        kinds.setdefault(repr(kind), options)
    return list(kinds.values())


def _lively(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` with a learning rate at which steps that differ lead to values that do."""
    rate = options.get("lr")
    if isinstance(rate, Tensor):
        return {**options, "lr": rate.clamp(min=_LEAST_RATE)}
    return (
        {**options, "lr": max(rate, _LEAST_RATE)}
        if isinstance(rate, (int, float))
        else dict(options)
    )


def _try_steps(
    optimizer: Optimizer,
    options: Mapping[str, Any],
    lengths: Sequence[int],
    *,
    shape: tuple[int, ...] | None = None,
    apart: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Three steps of a clone on made-up values, for small, ordinary and large gradients each;
    returns the values of each in a row, in fp32.
    """
    device = _device_of(optimizer)
    rows = []
    for scale in _SCALES:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(4, sum(lengths), generator=generator, device="cpu")
        drawn[0] *= min(scale, 1.0)  # else small gradients would hardly move what they meet
        drawn[1:] *= scale
        values, *gradients = (row.split(list(lengths)) for row in drawn.to(device, dtype))
        params = [nn.Parameter(piece.clone().view(shape or piece.shape)) for piece in values]
        groups = [[param] for param in params] if apart else [params]
        clones = [
            clone(optimizer, [{**_lively(options), "params": group}], defaultdict(dict))
            for group in groups
        ]
        for pieces in gradients:
            for param, gradient in zip(params, pieces, strict=True):
                param.grad = gradient.clone().view_as(param)
            for twin in clones:
                twin.step()
        rows.append(torch.cat([param.detach().reshape(-1).float() for param in params]))
    return torch.stack(rows)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether rows are the same up to rounding, which is that of the largest in each."""
    largest = one.abs().amax(1).nan_to_num(0.0, 0.0).tolist()
    return all(
        torch.allclose(row, like, atol=1e-6 * most, equal_nan=True)
        for row, like, most in zip(one, other, largest, strict=True)
    )
