"""Callbacks: methods of the user's that a run calls at its start and end, after each step,
evaluation and checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from dearmpi.comm.world import World
from dearmpi.engine.optimizer import DistributedOptimizer
from dearmpi.local.local_optimizer import LocalOptimizer
from dearmpi.train.loop.evaluation import Evaluation, Outcome
from dearmpi.train.loop.job import Job
from dearmpi.train.settings.settings import RunSettings
from dearmpi.train.tasks.own_code import explained
from dearmpi.train.tasks.task import CALLBACK_METHODS


@dataclass(slots=True)
class Fit:
    """The run as a callback sees it, on every rank.

    folder: of the run. step, total_steps: taken so far, those of earlier parts included, and at the
    end. loss, lr: of the last step; the loss is this rank's part, whose mean over ranks counts.
    evaluation: the last one. checkpoint: the last one, on rank 0. outcome: at the end.
    """

    job: Job
    folder: Path
    step: int
    loss: float | None = None
    lr: float | None = None
    evaluation: Evaluation | None = None
    checkpoint: Path | None = None
    outcome: Outcome | None = None

    @property
    def world(self) -> World:
        """The ranks that train; its methods are collective."""
        return self.job.world

    @property
    def model(self) -> nn.Module:
        """The model that is trained. Reading a parameter waits for it, on this rank alone."""
        return self.job.task.model

    @property
    def evaluated_model(self) -> nn.Module:
        """The model that evaluations measure: the moving average of a run with ``ema``."""
        return self.job.evaluated_model

    @property
    def optimizer(self) -> DistributedOptimizer | LocalOptimizer:
        """The optimizer; ``state_dict()`` and ``synchronize()`` are collective."""
        return self.job.optimizer

    @property
    def settings(self) -> RunSettings:
        """The settings of the run."""
        return self.job.settings

    @property
    def total_steps(self) -> int:
        """Steps at the end of the run."""
        return self.job.total_steps


class Callbacks:
    """Calls the callbacks of a run with its ``fit``. Raises TaskError, with file and line, for what
    one of them raises.
    """

    def __init__(self, callbacks: Sequence[object], fit: Fit) -> None:
        self.fit = fit
        self._called = {
            method: [call for one in callbacks if (call := getattr(one, method, None)) is not None]
            for method in CALLBACK_METHODS
        }

    def call(self, method: str) -> None:
        """Call ``method`` of all that have it."""
        for called in self._called[method]:
            with explained(f"callback {type(called.__self__).__name__}.{method} failed"):
                called(self.fit)
