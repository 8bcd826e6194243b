"""Whether an optimizer may be given pieces of parameters, found out by trial steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dearmpi.engine.probe.probe import require_separable
from dearmpi.engine.probe.trial import are_alike, first_state, kinds_of_options, lively, try_steps
from dearmpi.errors import ConfigError

_Forms = Sequence[tuple[Sequence[int], tuple[int, ...] | None]]

# The same numbers in one piece, in two as sharding makes them, as a matrix and as filters.
_FORMS: _Forms = (([24], None), ([9, 15], None), ([24], (6, 4)), ([24], (3, 2, 2, 2)))
# An optimizer may factor what has rows and columns enough alone, or quantise in whole blocks what
# has elements enough: these are beyond 128 and 16384, the second piece's below 4096.
_LARGE = (136, 160)
_MANY = prod(_LARGE)
_LARGE_FORMS: _Forms = (([_MANY], _LARGE), ([_MANY - 4001, 4001], None))
_SCALARS = (bool, int, float, str, type(None))  # what ranks can tell each other as text
_UNLIKELY = (7, _MANY)  # elements, which no tensor of something else has by chance


def require_elementwise(optimizer: Optimizer) -> None:
    """Raise ConfigError unless the optimizer treats every element by itself.

    Found out by trial: three steps on a small matrix, a large one, or on filters of a convolution,
    must give the same numbers as three steps on two pieces of it, which is what sharding makes of a
    parameter. Options may change what an optimizer does, so every kind of parameter group is tried.
    """
    for options in kinds_of_options(optimizer):
        try:
            is_elementwise = _makes_alike(optimizer, options, _FORMS) and _makes_alike(
                optimizer, options, _LARGE_FORMS, ordinary=True
            )
        except Exception as error:
            require_separable(optimizer)
            raise ConfigError(
                f"{type(optimizer).__name__} cannot be sharded (a trial step failed: {error}); use "
                "gather='gradients'",
                code="trial-step-failed",
            ) from error
        if not is_elementwise:
            raise ConfigError(
                f"{type(optimizer).__name__} does not treat every element by itself, so it needs "
                "whole tensors: use gather='gradients'",
                code="optimizer-needs-whole-tensors",
            )
        for num in _UNLIKELY:
            _require_state_by_elements(optimizer, options, num)


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


def _require_state_by_elements(
    optimizer: Optimizer, options: Mapping[str, Any], num_elements: int
) -> None:
    """Raise ConfigError for state that cannot be cut up where a shard ends, sent and saved."""
    _, state = first_state(optimizer, lively(options), (num_elements,))
    for key, value in state.items():
        if isinstance(value, Tensor):
            fits = value.numel() in (1, num_elements)
            kept = f"tensor of shape {tuple(value.shape)} where a piece has {num_elements} elements"
        else:
            kept, fits = type(value).__name__, isinstance(value, _SCALARS)
        if not fits:
            raise ConfigError(
                f"{type(optimizer).__name__} keeps {key!r} in its state as a {kept}, but a shard's "
                "state is cut up, sent and saved as tensors with a value for each element and "
                "single numbers; use gather='gradients', which leaves it whole",
                code="optimizer-needs-whole-tensors",
            )
