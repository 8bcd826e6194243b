"""Losses and gradients that are not finite, or no loss at all."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from dearmpi.comm.world import World
from dearmpi.errors import NonFiniteLossError, TaskError
from dearmpi.train import checkpoint
from dearmpi.train.loop.trainer import MOST_SKIPS, Trainer
from dearmpi.train.ranks.agreement import AgreedError
from dearmpi.train.settings.settings import RunSettings
from tests.codes import raises
from tests.unit.train.points import (
    SGD,
    Loss,
    Notes,
    Points,
    equal,
    make_job,
    make_task,
    parameters,
    squared_error,
    train,
)


def infinite_slope(model: nn.Module, batch: Any) -> Tensor:
    """A loss of zero whose gradient is NaN."""
    output: Tensor = model(batch[0])
    return (0.0 * output.square().sum()).sqrt()


def spoil(at: tuple[int, ...]) -> Loss:
    """A loss that is NaN at some steps, counted from 1."""
    seen = [0]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen[0] += model.training
        value = squared_error(model, batch)
        return value * math.nan if model.training and seen[0] in at else value

    return loss


def test_a_bad_loss_ends_the_run_and_the_last_checkpoint_is_sound(
    alone: World, tmp_path: Path
) -> None:
    settings = RunSettings(max_steps=9, checkpoint_interval=1, keep=9, **SGD)
    with raises(NonFiniteLossError, "not-finite", 4, "checkpoint is", 3):
        train(make_job(alone, settings, make_task(spoil((4,)))), tmp_path)
    latest = checkpoint.find_latest(tmp_path)
    assert latest is not None and latest.name == "step-00000003"
    assert all(tensor.isfinite().all() for tensor in checkpoint.load(latest).model.values())


def test_bad_parameters_are_not_saved_even_if_the_loss_is_finite(
    alone: World, tmp_path: Path
) -> None:
    settings = RunSettings(max_steps=1, **SGD)
    with raises(AgreedError, "not-finite", 1) as caught:
        train(make_job(alone, settings, make_task(infinite_slope, eval_count=0)), tmp_path)
    assert caught.value.exit_code == NonFiniteLossError.exit_code
    assert checkpoint.find_latest(tmp_path) is None


def test_clipping_sees_a_bad_gradient_before_it_reaches_the_model(
    alone: World, tmp_path: Path
) -> None:
    settings = RunSettings(max_steps=1, max_grad_norm=1.0, **SGD)
    job = make_job(alone, settings, make_task(infinite_slope, eval_count=0))
    before = parameters(job.task.model)
    with raises(NonFiniteLossError, "not-finite", "1 is"):
        train(job, tmp_path)
    assert equal(before, parameters(job.task.model))


def test_skipping_leaves_out_bad_steps_and_only_those(alone: World, tmp_path: Path) -> None:
    settings = RunSettings(max_steps=5, on_nan="skip", log_interval=1, **SGD)
    seen: list[list[Tensor]] = []
    job = make_job(alone, settings, make_task(spoil((2, 4))))
    notes = Notes()
    notes.stepped = lambda step: seen.append(parameters(job.task.model))  # type: ignore[method-assign]
    outcome = Trainer(job, tmp_path, listener=notes).run()
    assert outcome.num_skipped == 2
    assert [equal(a, b) for a, b in zip(seen, seen[1:], strict=False)] == [True, False, True, False]
    assert [row.loss is None for row in notes.rows] == [False, True, False, True, False]


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_skipping_leaves_the_statistics_of_a_bad_batch_out(
    alone: World, tmp_path: Path, max_grad_norm: float
) -> None:
    settings = RunSettings(max_steps=6, on_nan="skip", max_grad_norm=max_grad_norm, **SGD)
    task = make_task()
    task = replace(task, model=nn.Sequential(nn.BatchNorm1d(4), task.model))
    assert isinstance(task.train_data, Points)
    task.train_data.inputs[3] = math.nan  # one sample
    outcome, _ = train(make_job(alone, settings, task), tmp_path)
    assert 0 < outcome.num_skipped < 6
    assert all(buffer.isfinite().all() for buffer in task.model.buffers())
    assert task.model.get_buffer("0.num_batches_tracked") == 6 - outcome.num_skipped
    assert outcome.evaluation is not None and math.isfinite(outcome.evaluation.loss)


def test_skipping_gives_up_when_nothing_else_is_left(alone: World, tmp_path: Path) -> None:
    settings = RunSettings(max_steps=500, on_nan="skip", eval_interval=0, **SGD)
    task = make_task(spoil(tuple(range(3, 500))))
    with raises(NonFiniteLossError, "not-finite", MOST_SKIPS):
        train(make_job(alone, settings, task), tmp_path)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda model, batch: 1.0, ()),
        (lambda model, batch: model(batch[0]), ("(8, 1)",)),
        (lambda model, batch: model(batch[0]).detach().sum(), ()),
    ],
)
def test_a_loss_that_is_none_is_explained(
    alone: World, tmp_path: Path, loss: Loss, told: tuple[str, ...]
) -> None:
    settings = RunSettings(max_steps=1, **SGD)
    job = make_job(alone, settings, make_task(loss, eval_count=0))
    with raises(TaskError, "task-invalid", *told):
        train(job, tmp_path)
