"""Evaluation: each sample once, and nothing changed by it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dearmpi.comm.world import World
from dearmpi.errors import TaskError
from dearmpi.train.data.loading import InlineLoader
from dearmpi.train.loop.evaluation import Evaluator, probe_metrics
from dearmpi.train.ranks.random_state import capture_random_state
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.unit.train.points import Points, make_task, squared_error


def test_evaluation_counts_each_sample_once_at_any_number_of_ranks() -> None:
    torch.manual_seed(0)
    task = make_task(eval_count=7)
    assert task.eval_data is not None
    data = Points(7)
    with torch.no_grad():
        expected = float(squared_error(task.model, (data.inputs, data.targets)))

    def work(world: World) -> tuple[float, int, Mapping[str, float]]:
        assert task.eval_data is not None
        found = Evaluator(task, InlineLoader(task), "fp32", batch_size=3, names=("ones",)).run(
            world
        )
        assert found is not None
        return found.loss, found.num_samples, found.metrics

    for size in (1, 3, 8):
        for loss, num_samples, metrics in run_ranks(size, work):
            assert loss == pytest.approx(expected)
            assert (num_samples, metrics) == (7, {"ones": 1.0})


def test_evaluation_leaves_modes_and_gradients_as_they_were(alone: World) -> None:
    task = make_task()
    task.model[0].eval()  # type: ignore[index]
    assert task.eval_data is not None
    Evaluator(task, InlineLoader(task), "fp32", batch_size=3, names=("ones",)).run(alone)
    assert [module.training for module in task.model.modules()] == [True, False, True, True, True]
    assert torch.is_grad_enabled()


class Cropped(Points):
    """Loading a sample draws numbers, as a random crop does."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        torch.rand(1), np.random.random(), random.random()
        return super().__getitem__(index)


def test_evaluation_leaves_random_states_as_they_were(alone: World) -> None:
    """A run that goes on from a checkpoint saved before it would else draw other numbers."""
    task = replace(make_task(), eval_data=Cropped(7))
    before = capture_random_state()
    Evaluator(task, InlineLoader(task), "fp32", batch_size=3, names=("ones",)).run(alone)
    assert capture_random_state() == before


def test_metrics_that_come_in_another_order_on_another_rank_are_not_mixed_up() -> None:
    """As those of a set of names do, whose order is each process's own."""

    def work(world: World) -> Mapping[str, float]:
        values = {"top1": 1.0, "top5": 5.0}
        order = sorted(values, reverse=world.rank == 1)
        task = replace(make_task(eval_count=4), metrics=lambda *_: {n: values[n] for n in order})
        assert task.eval_data is not None
        names = probe_metrics(task, "fp32")
        found = Evaluator(task, InlineLoader(task), "fp32", batch_size=1, names=names).run(world)
        assert found is not None
        return found.metrics

    assert run_ranks(2, work) == [{"top1": 1.0, "top5": 5.0}] * 2


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (lambda *_: [1.0], "a list"),
        (lambda _, batch: {"hits": batch[1]}, "metric hits"),
        (lambda *_: {"hits": "two"}, "metric hits"),
    ],
)
def test_metrics_that_are_no_numbers_are_named_before_the_run(
    metrics: Callable[..., Any], said: str
) -> None:
    """One value per sample is a number where there is one sample."""
    with raises(TaskError, "metrics-invalid", said):
        probe_metrics(replace(make_task(eval_count=7), metrics=metrics), "fp32")


@pytest.mark.parametrize(
    ("loss", "code", "said"),
    [
        (lambda *_: torch.ones(3), "task-invalid", "a tensor of shape (3,); return the mean"),
        (lambda *_: None, "task-invalid", "NoneType"),
        (lambda *_: [][0], "task-code-failed", "IndexError"),
        (lambda *_: sys.exit(0), "task-code-failed", "SystemExit: 0"),
    ],
)
def test_a_loss_that_fails_is_explained_before_the_run(
    loss: Callable[..., Any], code: str, said: str
) -> None:
    with raises(TaskError, code, said):
        probe_metrics(replace(make_task(eval_count=7), loss=loss), "fp32")
