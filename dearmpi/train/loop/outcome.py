"""Outcome: how a run went."""

from __future__ import annotations

from dataclasses import dataclass

from dearmpi.train.loop.evaluation import Evaluation


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run went.

    step: optimizer steps taken in all, earlier runs included.
    stopped: a request to stop ended it before its length was reached.
    first_loss, last_loss: mean of the first and the last row; None where no step was taken.
    train_s, elapsed_s: seconds of this run's steps, and of all that it did.
    samples_per_s: over all ranks, evaluations and checkpoints aside.
    hidden_share: share of communication time, over all ranks, that computation covered; None
        where there was none.
    num_skipped: steps left out because a loss or a gradient was not finite.
    """

    step: int
    stopped: bool
    first_loss: float | None
    last_loss: float | None
    evaluation: Evaluation | None
    train_s: float
    elapsed_s: float
    samples_per_s: float
    hidden_share: float | None
    num_skipped: int
