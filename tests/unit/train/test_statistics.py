"""Statistics of layers such as BatchNorm: each rank gathers its own, and people see rank 0's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from dearmpi.comm.world import World
from dearmpi.train import checkpoint
from dearmpi.train.loop.evaluation import evaluating
from dearmpi.train.loop.job import Job
from dearmpi.train.loop.trainer import Trainer
from dearmpi.train.metrics.metrics import MetricsRow
from dearmpi.train.settings.settings import RunSettings
from tests.fakes.ranks import run_ranks
from tests.unit.train.points import SGD, Notes, Points, equal, make_job, make_task, squared_error

NUM_RANKS = 3  # with two, all statistics would lie in the half of a checkpoint that rank 0 writes
HELD_OUT = Points(7)


def make_normalized(world: World, *, eval_count: int = 0, **settings: Any) -> Job:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    task = replace(make_task(eval_count=eval_count), model=model)
    return make_job(world, RunSettings(max_steps=2, **SGD, **settings), task)


def statistics(job: Job) -> list[Tensor]:
    buffers = dict(job.task.model.named_buffers())
    return [buffers[f"1.running_{what}"].clone() for what in ("mean", "var")]


def test_a_checkpoint_holds_those_of_rank_0_and_training_goes_on_with_them(tmp_path: Path) -> None:
    def work(world: World) -> tuple[list[Tensor], list[Tensor]]:
        job, own, notes = make_normalized(world), list[list[Tensor]](), Notes()
        notes.stepped = lambda step: own.append(statistics(job))  # type: ignore[method-assign]
        Trainer(job, tmp_path, listener=notes).run()
        return own[-1], statistics(job)

    ranks = run_ranks(NUM_RANKS, work)
    first, _ = ranks[0]
    assert not any(equal(own, first) for own, _ in ranks[1:])  # else this would show nothing
    assert all(equal(after, first) for _, after in ranks)
    saved = checkpoint.load(tmp_path / "checkpoints" / "step-00000002").model
    assert equal([saved["1.running_mean"], saved["1.running_var"]], first)


def test_an_evaluation_is_of_one_model(tmp_path: Path) -> None:
    def work(world: World) -> list[tuple[float | None, float]]:
        job = make_normalized(world, eval_count=len(HELD_OUT), eval_interval=1)
        losses, notes = list[tuple[float | None, float]](), Notes()

        def measured(row: MetricsRow) -> None:
            with evaluating(job.task.model):
                alone = squared_error(job.task.model, (HELD_OUT.inputs, HELD_OUT.targets))
            losses.append((row.eval_loss, float(alone)))

        notes.measured = measured  # type: ignore[method-assign]
        Trainer(job, tmp_path, listener=notes).run()
        return losses

    for losses in run_ranks(NUM_RANKS, work):
        assert len(losses) == 2  # the first before anything is saved
        assert [together for together, _ in losses] == pytest.approx([one for _, one in losses])
