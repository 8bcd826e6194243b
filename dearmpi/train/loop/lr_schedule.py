"""Learning rate over a run, as a pure function of the step, so that there is no state to save."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dearmpi.train.settings.choices import LrSchedule
from dearmpi.train.settings.settings import RunSettings

MILESTONES = (0.5, 0.75)
GAMMA = 0.1


@dataclass(frozen=True, slots=True)
class LrCurve:
    """Factor on the base learning rate at each step.

    It rises in equal parts over ``warmup_steps``, the last of which has the full rate; then it
    stays (``constant``), falls to zero along half a cosine (``cosine``), or is multiplied by
    ``gamma`` after each of ``milestones``, which are shares of all ``total_steps`` (``step``).
    """

    kind: LrSchedule
    total_steps: int
    warmup_steps: int = 0
    milestones: tuple[float, ...] = MILESTONES
    gamma: float = GAMMA

    @property
    def notes(self) -> list[str]:
        """A line where the learning rate does nothing but rise, which a schedule does not tell."""
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
    """The curve that ``settings`` ask for."""
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
