"""Whether an optimizer may be given some of its parameters alone, each as a whole, and what the
updates of single tensors cost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dearmpi.engine.probe.probe import is_cuttable
from dearmpi.engine.probe.trial import (
    FirstState,
    are_alike,
    device_of_optimizer,
    in_training,
    kinds_of_options,
    lively,
    step_uncompiled,
)
from dearmpi.engine.update.update import clone, read_options
from dearmpi.errors import ConfigError
from dearmpi.plan.data.owners import known_cost

_SHAPES = ((6, 4), (4, 4), (6, 4))
_SUBSETS = ((0, 2), (1,)), ((0,), (1, 2))
_NUM_STEPS = 3


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
    found: dict[str, bool] = {}
    for kind in kinds_of_options(optimizer):
        found[_key(kind)] = not is_cuttable(optimizer, kind)
    groups = enumerate(optimizer.param_groups)
    kinds = {number: _key(in_training(optimizer, group)) for number, group in groups}
    return frozenset(number for number, key in kinds.items() if found.get(key, True))


def _key(options: Mapping[str, Any]) -> str:
    """The same for groups that differ in rates or names alone, as in ``kinds_of_options``."""
    return repr(
        {
            key: bool(value) if isinstance(value, float) else value
            for key, value in options.items()
            if key != "param_names" and not isinstance(value, Tensor)
        }
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
