"""What is kept of a run, however it ends, and what an evaluation costs it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi.comm.world import World
from dearmpi.errors import CheckpointError
from dearmpi.span import Track
from dearmpi.train import checkpoint
from dearmpi.train.loop.trainer import Trainer
from dearmpi.train.metrics import step_times
from dearmpi.train.metrics.metrics import MetricsRow
from dearmpi.train.ranks.agreement import AgreedError
from dearmpi.train.ranks.random_state import seed_all
from dearmpi.train.settings.settings import RunSettings
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.unit.engine.heard import Heard
from tests.unit.train.points import (
    SGD,
    Notes,
    equal,
    make_job,
    make_task,
    parameters,
    squared_error,
    train,
)


def test_a_failure_does_not_cost_the_checkpoint_before_it(alone: World, tmp_path: Path) -> None:
    """Even where no later step can tell that it is on the disk."""
    steps = iter(range(5))

    def fails_at_last(model: nn.Module, batch: Any) -> Tensor:
        if next(steps) == 4:
            raise ValueError("a bad sample")
        return squared_error(model, batch)

    settings = RunSettings(max_steps=9, checkpoint_interval=4, **SGD)
    with pytest.raises(ValueError, match="a bad sample"):
        train(make_job(alone, settings, make_task(fails_at_last, eval_count=0)), tmp_path)
    assert (tmp_path / "latest").read_text().strip() == "checkpoints/step-00000004"


def test_a_checkpoint_is_complete_before_the_evaluation_of_its_step(
    alone: World, tmp_path: Path
) -> None:
    """A rank that is killed there, or is out of memory, ends no saving."""
    found = []

    def looks(model: nn.Module, batch: Any) -> Tensor:
        if not model.training and len(batch[0]) > 2:  # two samples are looked at before the start
            found.append((tmp_path / "latest").read_text().strip())
        return squared_error(model, batch)

    settings = RunSettings(max_steps=3, checkpoint_interval=2, eval_interval=2, **SGD)
    train(make_job(alone, settings, make_task(looks)), tmp_path)
    assert found[0] == "checkpoints/step-00000002"


def test_each_wait_for_the_disk_is_told_once(alone: World, tmp_path: Path) -> None:
    """One before the next checkpoint is a part of that, one before an evaluation stands alone."""
    heard = Heard()
    settings = RunSettings(max_steps=4, checkpoint_interval=1, eval_interval=2, **SGD)
    job = make_job(alone, settings)
    job.optimizer.spans.recorder = heard
    train(job, tmp_path)
    spans = sorted((s.start_s, s.stop_s) for s in heard.spans if s.track is Track.CHECKPOINT)
    assert len(spans) == 6  # four checkpoints, and waits before two evaluations
    assert all(stop_s <= start_s for (_, stop_s), (start_s, _) in itertools.pairwise(spans))


def test_an_evaluation_that_fails_at_the_end_does_not_cost_the_run(
    alone: World, tmp_path: Path
) -> None:
    def fails_on_held_out(model: nn.Module, batch: Any) -> Tensor:
        if not model.training and len(batch[0]) > 2:  # two samples are looked at before the start
            raise ValueError("a bad sample")
        return squared_error(model, batch)

    job = make_job(alone, RunSettings(max_steps=2, **SGD), make_task(fails_on_held_out))
    with pytest.raises(ValueError, match="a bad sample"):
        train(job, tmp_path)
    assert (tmp_path / "latest").read_text().strip() == "checkpoints/step-00000002"


def test_who_is_asked_to_stop_evaluates_no_more(alone: World, tmp_path: Path) -> None:
    """The job may have a minute left, and the checkpoint is what counts."""
    settings = RunSettings(max_steps=9, eval_interval=1, **SGD)
    outcome, notes = train(make_job(alone, settings), tmp_path, stop_after=4)
    assert outcome.stopped and outcome.step == 4
    assert [row.step for row in notes.rows if row.eval_loss is not None] == [1, 2, 3]
    assert notes.rows[-1].step == 4 and notes.checkpoints == ["step-00000004"]


def test_who_is_asked_to_stop_in_the_last_step_has_a_whole_run(
    alone: World, tmp_path: Path
) -> None:
    settings = RunSettings(max_steps=4, eval_interval=1, **SGD)
    outcome, notes = train(make_job(alone, settings), tmp_path, stop_after=4)
    assert not outcome.stopped
    assert [row.step for row in notes.rows if row.eval_loss is not None] == [1, 2, 3, 4]


@pytest.mark.parametrize("size", [1, 2])
def test_a_stop_comes_after_the_step_at_hand_where_steps_are_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(step_times, "LONG_STEP_S", 0.0)

    def work(world: World) -> tuple[int, bool]:
        job, is_last = make_job(world, RunSettings(max_steps=9, **SGD)), world.rank == size - 1
        outcome, _ = train(job, tmp_path, stop_after=5 if is_last else None)
        return outcome.step, outcome.stopped

    assert run_ranks(size, work) == [(5, True)] * size
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]


@pytest.mark.parametrize("size", [1, 2])
def test_a_stop_breaks_off_the_evaluation_under_way_on_all_ranks(tmp_path: Path, size: int) -> None:
    """It may outlast what a scheduler grants. The last rank is asked in its third batch."""

    def work(world: World) -> tuple[int, bool, list[int], list[MetricsRow], int]:
        batches: list[int] = []

        def counted(model: nn.Module, batch: Any) -> Tensor:
            if not model.training and len(batch[0]) > 2:  # two are looked at before the start
                batches.append(len(batch[0]))
            return squared_error(model, batch)

        settings = RunSettings(max_steps=9, eval_interval=4, **SGD)
        job = make_job(world, settings, make_task(counted, eval_count=20 * 8))
        notes = Notes()
        asked = world.rank == size - 1
        trainer = Trainer(
            job, tmp_path, listener=notes, stop_requested=lambda: asked and len(batches) >= 3
        )
        outcome = trainer.run()
        assert outcome.evaluation is None
        return outcome.step, outcome.stopped, notes.steps, notes.rows, len(batches)

    for rank, (step, stopped, steps, rows, num_batches) in enumerate(run_ranks(size, work)):
        assert (step, stopped, steps) == (4, True, [1, 2, 3, 4])
        assert [(row.step, row.eval_loss) for row in rows] == [(4, None)]
        assert num_batches == (3 if rank == size - 1 else 20)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


def test_the_last_evaluation_goes_to_its_end(alone: World, tmp_path: Path) -> None:
    """Nothing is left to do after it, and the run would only be queued again for it."""
    batches: list[int] = []

    def counted(model: nn.Module, batch: Any) -> Tensor:
        if not model.training:
            batches.append(len(batch[0]))
        return squared_error(model, batch)

    job = make_job(alone, RunSettings(max_steps=2, **SGD), make_task(counted, eval_count=40))
    notes = Notes()
    trainer = Trainer(job, tmp_path, listener=notes, stop_requested=lambda: len(batches) >= 3)
    outcome = trainer.run()
    assert not outcome.stopped and outcome.evaluation is not None
    assert notes.rows[-1].eval_loss == outcome.evaluation.loss


def test_evaluations_leave_random_numbers_to_training(alone: World, tmp_path: Path) -> None:
    def noisy_error(model: nn.Module, batch: Any) -> Tensor:
        return squared_error(model, batch) + 0.0 * torch.rand(1).sum()

    def trained(eval_interval: int) -> list[Tensor]:
        settings = RunSettings(max_steps=4, eval_interval=eval_interval, **SGD)
        seed_all(settings.seed)
        job = make_job(alone, settings, make_task(noisy_error, dropout=0.5))
        train(job, tmp_path / str(eval_interval))
        return parameters(job.task.model)

    assert equal(trained(1), trained(0))


def test_a_resumed_run_that_keeps_fewer_makes_room_before_it_writes(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RunSettings(max_steps=3, checkpoint_interval=1, **SGD)
    train(make_job(alone, settings), tmp_path)
    latest = checkpoint.find_latest(tmp_path)
    assert latest is not None and len(list(latest.parent.iterdir())) == 3

    def is_full(draft: checkpoint.PendingCheckpoint) -> None:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(checkpoint.PendingCheckpoint, "begin", is_full)
    settings = RunSettings(max_steps=4, keep=1, **SGD)
    job = make_job(alone, settings, snapshot=checkpoint.load(latest))
    with raises(AgreedError, "unnamed", "disk is"):
        train(job, tmp_path)
    assert list(latest.parent.iterdir()) == [latest]


def test_a_mask_of_infinities_is_saved(alone: World, tmp_path: Path) -> None:
    task = make_task()
    task.model.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
    train(make_job(alone, RunSettings(max_steps=2, **SGD), task), tmp_path)
    found = checkpoint.load(tmp_path / "checkpoints" / "step-00000002").model["mask"]
    assert torch.equal(found, task.model.get_buffer("mask"))
