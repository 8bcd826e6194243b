"""What an optimizer can do, found out by trial steps: by buckets, on pieces, in half precision, on
some whole parameters alone; and what the updates of single tensors cost.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dearmpi.engine.probe.trial import (
    FirstState,
    TrialBucket,
    are_alike,
    device_of_optimizer,
    first_state,
    in_training,
    kind_of,
    kinds_of_options,
    lively,
    step_uncompiled,
    try_steps,
)
from dearmpi.engine.update.update import clone, is_elementwise_tensor, on_host, read_options
from dearmpi.errors import ConfigError
from dearmpi.plan.data.owners import known_cost

_SHAPES = ((6, 4), (4, 4), (6, 4))
_SUBSETS = ((0, 2), (1,)), ((0,), (1, 2))
_NUM_STEPS = 3


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
                f"{name} couples all parameters in one step, so it cannot run bucket by bucket: "
                "trial steps of two parameters apart differ from those of both together by up to "
                f"{float((together - apart).abs().max()):.3g}; use an optimizer whose update of a "
                "parameter reads no other, or train on one rank",
                code="optimizer-couples-buckets",
            )


_LONG = 16  # steps: RAdam divides by a variance from the sixth on


def require_linear(optimizer: Optimizer, compress: str) -> None:
    """Raise ConfigError unless steps are linear in the gradients, as those of SGD are.

    Then it makes no difference in the end in which step a part of a gradient arrives.
    """
    name, device = type(optimizer).__name__, device_of_optimizer(optimizer)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, _LONG, 16, generator=generator, dtype=torch.float64, device="cpu")
    sides = (torch.zeros_like(drawn[0]), drawn[0], drawn[1], drawn[0] + drawn[1])
    for options in kinds_of_options(optimizer):
        ends = []
        for gradients in sides:
            values = torch.linspace(-1.0, 1.0, 16, dtype=torch.float64, device=device)
            bucket = TrialBucket(values, [16])
            twin = clone(optimizer, [lively(options)], FirstState(optimizer))
            for gradient in gradients:
                bucket.fill(gradient)
                step_uncompiled(twin, read_options(twin), {0: bucket.members})
            ends.append(bucket.values)
        none, one, other, both = ends
        if not torch.allclose(both - none, (one - none) + (other - none), rtol=1e-6, atol=1e-9):
            raise ConfigError(
                f"compress is {compress!r}, but steps of {name} are not linear in the gradient: it "
                "would take the zeros and sums of a sparse gradient for real ones; take "
                "error_feedback 'ef21', compress 'int8' or 'int4', or torch.optim.SGD, with "
                "momentum or without",
                code="optimizer-not-linear",
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
    capture, do so on the device, and work nowhere else. On the host there are none.
    """
    if device_of_optimizer(optimizer).type == "cpu":
        return tuple(frozenset() for _ in optimizer.param_groups)
    with torch.device("cpu"):  # as on the progress thread, where no default of the user's holds
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


_Forms = Sequence[tuple[Sequence[int], tuple[int, ...] | None]]

# The same numbers in one piece, in two as sharding makes them, as a matrix and as filters.
_FORMS: _Forms = (([24], None), ([9, 15], None), ([24], (6, 4)), ([24], (3, 2, 2, 2)))
# An optimizer may factor what has rows and columns enough alone, or quantise in whole blocks what
# has elements enough: these are beyond 128 and 16384, the second piece's below 4096.
_LARGE = (136, 160)
_MANY = prod(_LARGE)
_LARGE_FORMS: _Forms = (([_MANY], _LARGE), ([_MANY - 4001, 4001], None))
_SCALARS = (bool, int, float, str, type(None))  # what ranks can exchange as text
_UNLIKELY = (7, _MANY)  # elements, which no tensor of something else has by chance


def require_elementwise(optimizer: Optimizer) -> None:
    """Raise ConfigError unless the optimizer treats every element by itself.

    Found out by trial, on a small matrix, a large one, and on filters of a convolution: three steps
    must give the same numbers as three steps on two pieces of it. Sharding makes such pieces of a
    parameter. Options may change what an optimizer does, so every kind of parameter group is tried.
    """
    for options in kinds_of_options(optimizer):
        try:
            fits = _is_elementwise(optimizer, options)
        except Exception as error:
            require_separable(optimizer)
            raise ConfigError(
                f"{type(optimizer).__name__} cannot update pieces of tensors (a trial step failed: "
                f"{error}); use shards='whole', so that each tensor has one owner, or "
                "gather='gradients', with which every rank updates all",
                code="trial-step-failed",
            ) from error
        if not fits:
            raise ConfigError(
                f"{type(optimizer).__name__} does not treat every element by itself, so it needs "
                "whole tensors: use shards='whole', so that each tensor has one owner, or "
                "gather='gradients', with which every rank updates all",
                code="optimizer-needs-whole-tensors",
            )
        _require_state_by_elements(optimizer, options)


def is_cuttable(optimizer: Optimizer, options: Mapping[str, Any]) -> bool:
    """Whether ``require_elementwise`` finds nothing against parameters with ``options``."""
    try:
        fits = _is_elementwise(optimizer, options)
        _require_state_by_elements(optimizer, options)
    except Exception:  # it takes no pieces at all
        return False
    return fits


def _is_elementwise(optimizer: Optimizer, options: Mapping[str, Any]) -> bool:
    """Whether steps with ``options`` treat every element by itself.

    Raises what a trial step does.
    """
    return _makes_alike(optimizer, options, _FORMS) and _makes_alike(
        optimizer, options, _LARGE_FORMS, ordinary=True
    )


def _makes_alike(
    optimizer: Optimizer, options: Mapping[str, Any], forms: _Forms, *, ordinary: bool = False
) -> bool:
    """Whether steps make the same of the same numbers in each of ``forms``; ``ordinary`` as in
    ``try_steps``.
    """
    whole, *others = (
        try_steps(optimizer, options, lengths, shape=shape, ordinary=ordinary)
        for lengths, shape in forms
    )
    return all(are_alike(whole, other) for other in others)


def _require_state_by_elements(optimizer: Optimizer, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for state that cannot be cut up where a shard ends, sent and saved."""
    for num_elements in _UNLIKELY:
        _, state = first_state(optimizer, lively(options), (num_elements,))
        _check_state_by_elements(optimizer, state, num_elements)


def _check_state_by_elements(
    optimizer: Optimizer, state: Mapping[str, Any], num_elements: int
) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor):
            fits = value.numel() in (1, num_elements)
            kept = f"tensor of shape {tuple(value.shape)} where a piece has {num_elements} elements"
        else:
            kept, fits = type(value).__name__, isinstance(value, _SCALARS)
        if not fits:
            raise ConfigError(
                f"{type(optimizer).__name__} keeps {key!r} in its state as a {kept}. A shard's "
                "state is cut up, sent and saved as tensors with a value for each element and "
                "single numbers; use shards='whole' or gather='gradients', which leave it whole",
                code="optimizer-needs-whole-tensors",
            )


def require_tensorwise(optimizer: Optimizer) -> None:
    """Raise ConfigError unless stepping some parameters gives what stepping all of them gives.

    Tried with three matrices of two shapes, for every kind of parameter group.
    """
    name = type(optimizer).__name__
    for options in kinds_of_options(optimizer):
        try:
            together = _train(optimizer, options, [range(len(_SHAPES))])
            apart = [_train(optimizer, options, subsets) for subsets in _SUBSETS]
        except Exception as error:
            raise ConfigError(
                f"{name} cannot update parameters on their owners (a trial step failed: {error}); "
                "use gather='gradients'",
                code="trial-step-failed",
            ) from error
        for subsets, values in zip(_SUBSETS, apart, strict=True):
            if not are_alike(together, values):
                most = float((together - values).abs().max())
                parts = " and ".join(
                    ", ".join(str(_SHAPES[index]) for index in subset) for subset in subsets
                )
                raise ConfigError(
                    f"{name} reads other parameters than the one that it updates: trial steps of "
                    f"{parts} apart differ from those of all together by up to {most:.3g}, so no "
                    "rank can own some of them; use gather='gradients', or an optimizer that "
                    "treats each tensor by itself",
                    code="optimizer-couples-tensors",
                )


def _train(
    optimizer: Optimizer, options: Mapping[str, Any], subsets: Sequence[Sequence[int]]
) -> Tensor:
    """Three steps of made-up matrices, each subset by a clone of its own; the values, flat."""
    made = [*_made_up(device_of_optimizer(optimizer))]
    ends = [drawn[0].clone() for drawn in made]
    for subset in subsets:
        twin = clone(optimizer, [lively(options)], FirstState(optimizer))
        members = [ends[index] for index in subset]
        for step in range(1, 1 + _NUM_STEPS):
            for index, member in zip(subset, members, strict=True):
                member.grad = made[index][step].clone()
            step_uncompiled(twin, read_options(twin), {0: members})
    return torch.cat([end.reshape(-1) for end in ends]).float()[None]


def _made_up(device: torch.device) -> Iterator[Tensor]:
    """For each shape: values and gradients, (1 + steps, rows, columns)."""
    generator = torch.Generator().manual_seed(0)
    for shape in _SHAPES:
        drawn = torch.randn(1 + _NUM_STEPS, *shape, generator=generator, device="cpu")
        yield drawn.to(device)


def tensorwise_groups(optimizer: Optimizer) -> frozenset[int]:
    """The param groups whose parameters cannot be cut: updates treat whole tensors, or the state
    does not follow the elements.
    """
    kinds = kinds_of_options(optimizer)
    cuttable = {kind_of(options): is_cuttable(optimizer, options) for options in kinds}
    return frozenset(
        number
        for number, group in enumerate(optimizer.param_groups)
        if not cuttable[kind_of(in_training(optimizer, group))]
    )


def cost_of_update(optimizer: Optimizer, group: Mapping[str, Any], shape: Sequence[int]) -> float:
    """What one update of a tensor costs: operations, where the optimizer is known by the name of
    its class, or of one that this derives from; else seconds, of a trial step.
    """
    for kind in type(optimizer).__mro__:
        if (known := known_cost(kind.__name__, shape)) is not None:
            return known
    device = device_of_optimizer(optimizer)
    values = torch.zeros(prod(shape), device=device).view(tuple(shape))
    options = lively(in_training(optimizer, group))
    twin = clone(optimizer, [options], FirstState(optimizer))
    times = []
    for _ in range(2):  # the first makes the state
        values.grad = torch.ones_like(values)
        begin_s = time.perf_counter()
        step_uncompiled(twin, read_options(twin), {0: [values]})
        times.append(time.perf_counter() - begin_s)
    return float(f"{times[-1]:.1e}")
