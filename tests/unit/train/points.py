"""A task of a few points, trained in this process, and what a listener is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dearmpi.comm.world import World
from dearmpi.train.checkpoint.snapshot import Snapshot
from dearmpi.train.loop.evaluation import Outcome
from dearmpi.train.loop.job import Job, prepare
from dearmpi.train.loop.optimizers import choose_optimizer
from dearmpi.train.loop.trainer import Trainer
from dearmpi.train.metrics.metrics import MetricsRow
from dearmpi.train.ranks.random_state import seed_all
from dearmpi.train.settings.settings import RunSettings
from dearmpi.train.tasks.task import Task

Loss = Callable[[nn.Module, Any], Tensor]


class Points:
    """Points and their targets, drawn once."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.inputs = torch.randn(count, 4, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True).sin()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def count_of_samples(model: nn.Module, batch: Any) -> Mapping[str, float]:
    return {"ones": float(len(batch[0]))}


def make_task(loss: Loss = squared_error, *, dropout: float = 0.0, eval_count: int = 7) -> Task:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
    return Task(
        "points",
        model,
        Points(20),
        loss,
        eval_data=Points(eval_count) if eval_count else None,
        metrics=count_of_samples,
    )


def make_job(
    world: World, settings: RunSettings, task: Task | None = None, snapshot: Snapshot | None = None
) -> Job:
    if task is None:
        seed_all(settings.seed)
        task = make_task()
    return prepare(world, settings, task, choice=choose_optimizer(settings), snapshot=snapshot)


@dataclass
class Notes:
    """A listener that remembers."""

    steps: list[int] = field(default_factory=list)
    rows: list[MetricsRow] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    intervals: list[tuple[float, float]] = field(default_factory=list)

    def stepped(self, step: int) -> None:
        self.steps.append(step)

    def measured(self, row: MetricsRow) -> None:
        self.rows.append(row)

    def saved(self, checkpoint: Path | None) -> None:
        if checkpoint is not None:  # as on rank 0 alone
            self.checkpoints.append(checkpoint.name)

    def chose_interval(self, save_time_s: float, checkpoint_s: float) -> None:
        self.intervals.append((save_time_s, checkpoint_s))


def train(job: Job, folder: Path, *, stop_after: int | None = None) -> tuple[Outcome, Notes]:
    """stop_after: in which step it is asked to stop, not in the evaluation before it."""
    folder.mkdir(exist_ok=True)
    notes = Notes()

    def stop_requested() -> bool:
        is_stepping = job.task.model.training
        return stop_after is not None and is_stepping and len(notes.steps) + 1 >= stop_after

    return Trainer(job, folder, listener=notes, stop_requested=stop_requested).run(), notes


def parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


SGD: dict[str, Any] = {"optimizer": "SGD", "lr": 0.1, "batch_size": 8}
