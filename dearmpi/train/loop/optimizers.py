"""Optimizers by their name in torch.optim."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dearmpi.config import known_names
from dearmpi.errors import TaskError
from dearmpi.train.settings.settings import RunSettings

# LBFGS calls the model several times a step; SparseAdam takes gradients that are no dense tensors.
UNSUITED = ("LBFGS", "SparseAdam")
FROM_FLAGS = ("lr", "momentum", "weight_decay")


@dataclass(frozen=True, slots=True)
class OptimizerChoice:
    """An optimizer class of torch.optim, and the arguments to make it with."""

    kind: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]

    @property
    def lr(self) -> float:
        """The learning rate, torch's own default where none was chosen."""
        return float(self.arguments["lr"])

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make it for ``parameters``. Raises TaskError, with torch's reason, where it cannot be."""
        try:
            return self.kind(list(parameters), **self.arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TaskError(f"optimizer {self.kind.__name__} cannot be made: {error}") from error


def known_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Optimizers of torch.optim that can train with one gradient per step, by name."""
    return {
        name: kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
        and name not in UNSUITED
    }


def choose_optimizer(settings: RunSettings) -> OptimizerChoice:
    """The optimizer that ``settings`` ask for.

    Raises TaskError for a name that torch.optim does not have, and for an option that the
    optimizer does not take.
    """
    kind = _find(settings.optimizer)
    accepted = inspect.signature(kind).parameters
    arguments = dict(settings.optimizer_options)
    for name in FROM_FLAGS:
        value = getattr(settings, name)
        if value is None:
            continue
        if name in arguments:
            raise TaskError(
                f"{name} is given twice, as --{name.replace('_', '-')} {value} and as "
                f"--optimizer-option {name}={arguments[name]}; give it once"
            )
        arguments[name] = value
    options = [name for name in accepted if name != "params"]
    for name in arguments:
        if name not in options:
            raise TaskError(
                f"{name} has no effect: {kind.__name__} has no such option"
                f"{known_names(name, options)}"
            )
    arguments.setdefault("lr", accepted["lr"].default)
    return OptimizerChoice(kind, arguments)


def _find(name: str) -> type[torch.optim.Optimizer]:
    known = known_optimizers()
    by_lower = {key.lower(): kind for key, kind in known.items()}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    if name.lower() in (other.lower() for other in UNSUITED):
        raise TaskError(
            f"optimizer {name} cannot be used: it needs more than one dense gradient per step; "
            f"choose one of {', '.join(sorted(known))}"
        )
    raise TaskError(f"unknown optimizer {name!r}{known_names(name, sorted(known))}")
