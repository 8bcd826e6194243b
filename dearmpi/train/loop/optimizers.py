"""Optimizers by their name in torch.optim, and the learning rate over a run.

The learning rate is a pure function of the step, so there is no state to save.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dearmpi.config import known_names
from dearmpi.errors import TaskError
from dearmpi.train.settings.choices import LrSchedule
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
            raise TaskError(
                f"optimizer {self.kind.__name__} cannot be made: {error}",
                code="optimizer-not-built",
            ) from error


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
    """The optimizer that ``settings`` name.

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
                f"--optimizer-option {name}={arguments[name]}; give it once",
                code="given-twice",
            )
        arguments[name] = value
    options = [name for name in accepted if name != "params"]
    for name in arguments:
        if name not in options:
            raise TaskError(
                f"{name} has no effect: {kind.__name__} has no such option"
                f"{known_names(name, options)}",
                code="setting-without-effect",
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
            f"choose one of {', '.join(sorted(known))}",
            code="optimizer-not-built",
        )
    raise TaskError(
        f"unknown optimizer {name!r}{known_names(name, sorted(known))}", code="unknown-choice"
    )


MILESTONES = (0.5, 0.75)
GAMMA = 0.1


@dataclass(frozen=True, slots=True)
class LrCurve:
    """Factor on the base learning rate at each step.

    It rises in equal parts over ``warmup_steps``, the last of which has the full rate. Then it
    stays (``constant``) or falls to zero along half a cosine (``cosine``). With ``step`` it is
    multiplied by ``gamma`` after each of ``milestones``, which are shares of ``total_steps``.
    """

    kind: LrSchedule
    total_steps: int
    warmup_steps: int = 0
    milestones: tuple[float, ...] = MILESTONES
    gamma: float = GAMMA

    @property
    def notes(self) -> list[str]:
        """A line for people where the run ends before the warm-up does."""
        if self.warmup_steps <= self.total_steps:
            return []
        return [
            f"the learning rate rises over {self.warmup_steps} steps, but the run has "
            f"{self.total_steps}: it ends at {100 * self.total_steps / self.warmup_steps:.3g}% of "
            "--lr, and no schedule follows; give fewer --warmup-steps, or train longer"
        ]

    def factor(self, step: int) -> float:
        """The factor of step number ``step``, from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        match self.kind:
            case "constant":
                return 1.0
            case "cosine":
                rest = max(1, self.total_steps - self.warmup_steps)
                share = min(1.0, (step - self.warmup_steps) / rest)
                return 0.5 * (1.0 + math.cos(math.pi * share))
            case "step":
                # A share such as 0.55 of 100 steps is a hair above 55 in binary.
                passed = sum(step >= share * self.total_steps - 1e-6 for share in self.milestones)
                return float(self.gamma**passed)


def lr_curve(settings: RunSettings, *, total_steps: int, steps_per_epoch: int) -> LrCurve:
    """The curve that ``settings`` describe."""
    warmup_steps = settings.warmup_steps or 0
    if settings.warmup_epochs is not None:
        warmup_steps = round(settings.warmup_epochs * steps_per_epoch)
    return LrCurve(
        settings.lr_schedule,
        total_steps,
        warmup_steps,
        MILESTONES if settings.lr_milestones is None else settings.lr_milestones,
        GAMMA if settings.lr_gamma is None else settings.lr_gamma,
    )
