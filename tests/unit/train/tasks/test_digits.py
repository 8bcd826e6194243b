"""digits: its split, and that its recommended settings reach their accuracy."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from dearmpi.errors import TaskError
from dearmpi.train.data.data import Batches, load_batch
from dearmpi.train.tasks.image_models import Labelled, build_digits, held_out_of_each_class
from dearmpi.train.tasks.task import Task
from tests.codes import raises


def setting(task: Task, name: str) -> float:
    value = task.defaults[name]
    assert isinstance(value, int | float)
    return value


def train_as_recommended(task: Task, *, epochs: int) -> None:
    """A single-process stand-in of the trainer, with the task's own defaults."""
    rate, warmup = setting(task, "lr"), setting(task, "warmup_steps")
    batches = Batches(len(task.train_data), int(setting(task, "batch_size")), 1, 0)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=rate)
    num_steps = epochs * batches.steps_per_epoch
    for step in range(num_steps):
        decay = 0.5 * (1 + math.cos(math.pi * step / num_steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / warmup) * decay
        (share,) = batches.step(*divmod(step, batches.steps_per_epoch))
        optimizer.zero_grad()
        loss = task.loss(task.model, load_batch(task, task.train_data, share.indices))
        torch.autograd.backward(loss)
        optimizer.step()


def accuracy(task: Task) -> float:
    assert task.metrics is not None
    assert task.eval_data is not None
    batch = load_batch(task, task.eval_data, tuple(range(len(task.eval_data))))
    return task.metrics(task.model, batch)["accuracy"] / len(task.eval_data)


@pytest.mark.parametrize(
    ("part", "least"), [(10, 0.85), pytest.param(2, 0.97, marks=pytest.mark.slow)]
)
def test_recommended_settings_learn_in_a_part_of_their_epochs(part: int, least: float) -> None:
    pytest.importorskip("sklearn")
    torch.manual_seed(0)
    task = build_digits({})
    assert task.defaults["optimizer"] == "AdamW"
    assert accuracy(task) < 0.3
    train_as_recommended(task, epochs=int(setting(task, "epochs")) // part)
    assert accuracy(task) >= least


def test_a_fifth_of_each_class_is_held_out_and_nothing_is_lost() -> None:
    pytest.importorskip("sklearn")
    task = build_digits({})
    assert isinstance(task.train_data, Labelled)
    assert isinstance(task.eval_data, Labelled)
    of_train = task.train_data.labels.bincount()
    of_test = task.eval_data.labels.bincount()
    assert int((of_train + of_test).sum()) == 1797
    assert torch.equal(of_test, (of_train + of_test) // 5)


def test_every_so_many_of_each_class_are_held_out() -> None:
    mask = held_out_of_each_class([0, 0, 1, 0, 1, 1, 0, 2], every=2)
    assert mask.tolist() == [False, True, False, False, True, False, True, False]


def test_the_model_also_trains_in_fp64() -> None:
    pytest.importorskip("sklearn")
    task = build_digits({"width": "4"})
    model = task.model.double()
    loss = task.loss(model, load_batch(task, task.train_data, (0, 1, 2)))
    torch.autograd.backward(loss)
    assert loss.dtype == torch.float64


def test_without_scikit_learn_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with raises(TaskError, "library-missing", "scikit-learn", "'dearmpi[digits]'"):
        build_digits({})


def test_an_unknown_option_is_refused() -> None:
    with raises(TaskError, "unknown-task-option", "'data'"):
        build_digits({"data": "x"})
