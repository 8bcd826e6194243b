"""Best evaluation: the lowest held-out loss so far, and how long ago it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from dearmpi.train.checkpoint.snapshot import Snapshot
from dearmpi.train.settings.settings import RunSettings


@dataclass(slots=True)
class BestEvaluation:
    """The same on all ranks, as held-out losses are.

    keeps: whether the checkpoint of the best is kept. patience: evaluations without a lower loss
    after which the run is over; None: it never is.
    step, loss: of the best; None before the first evaluation. num_worse: evaluations since.
    last_step: of the last evaluation; a stop may have come before the one that was due.
    """

    keeps: bool = False
    patience: int | None = None
    step: int | None = None
    loss: float | None = None
    num_worse: int = 0
    last_step: int | None = None

    @classmethod
    def of(cls, settings: RunSettings, snapshot: Snapshot | None) -> Self:
        """What ``settings`` ask for, as far as the run that wrote ``snapshot`` had come."""
        stored: Mapping[str, Any] = {} if snapshot is None else snapshot.meta.get("best", {})
        return cls(settings.keep_best, settings.patience, **stored)

    @property
    def is_watched(self) -> bool:
        """Whether anything follows from an evaluation."""
        return self.keeps or self.patience is not None

    @property
    def is_over(self) -> bool:
        """Whether the last ``patience`` evaluations brought nothing."""
        return self.patience is not None and self.num_worse >= self.patience

    def note(self, step: int, loss: float) -> bool:
        """Whether ``loss``, after ``step``, is the lowest so far; a NaN never is."""
        self.last_step = step
        if self.loss is None or loss < self.loss:
            self.step, self.loss, self.num_worse = step, loss, 0
            return True
        self.num_worse += 1
        return False

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {
            "step": self.step,
            "loss": self.loss,
            "num_worse": self.num_worse,
            "last_step": self.last_step,
        }

    def describe(self, scale: float = 1.0) -> list[str]:
        """Lines for people on the best and on an early end. scale: for the loss that is shown."""
        if not self.is_watched or self.loss is None:
            return []
        line = f"lowest held-out loss: {self.loss * scale:.4f} at step {self.step}"
        if self.keeps:
            line += ", kept as the checkpoint that the file best names"
        if self.is_over:
            line += f"; ended early, after {self.num_worse} evaluations without a lower one"
        return [line]
