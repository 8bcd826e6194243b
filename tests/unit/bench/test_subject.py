"""What methods are measured on: a task's samples, and what is wrong with a model at the end."""

from __future__ import annotations

import math

import torch
from torch import nn

from dearmpi.bench.subject import ReplaySubject, task_subject
from dearmpi.plan.profile import profile_workload
from dearmpi.plan.workload import read_workload
from dearmpi.train.task import Task


def test_each_rank_of_a_task_has_samples_of_its_own() -> None:
    samples = [torch.tensor([float(number)]) for number in range(24)]
    task = Task("numbers", nn.Linear(1, 1), samples, lambda model, batch: model(batch).mean())
    subjects = [task_subject(task, batch_size=3, rank=rank, world_size=2) for rank in range(2)]
    seen = [set(torch.cat(subject.batches).flatten().tolist()) for subject in subjects]
    assert not seen[0] & seen[1]
    assert seen[0] | seen[1] == {float(number) for number in range(24)}


def test_parameters_that_were_gathered_in_half_precision_have_trained() -> None:
    """After many steps what bfloat16 cannot show is more than half a step."""
    profile = profile_workload(read_workload("equal:0.01:2"), feed_forward_s=1.0, backprop_s=1.0)
    subject = ReplaySubject(profile, batch_size=1, rank=0, world_size=4)
    model, steps, learning_rate = subject.build(), 304, 1e-3
    trained = -learning_rate * steps * (1 + 4) / 2
    for shown, is_right in (
        (trained, True),
        (float(torch.tensor(trained).bfloat16()), True),
        (trained * (1 - 1 / steps), False),
        (float(torch.tensor(trained * 0.98).bfloat16()), False),
    ):
        for param in model.parameters():
            nn.init.constant_(param, shown)
        assert (subject.problem(model, steps) == "") == is_right


def test_a_model_that_is_not_finite_has_not_trained() -> None:
    task = Task("one", nn.Linear(1, 1), [torch.ones(1)], lambda model, batch: model(batch).mean())
    subject = task_subject(task, batch_size=1, rank=0, world_size=1)
    model = subject.build()
    assert subject.problem(model, 1) == ""
    nn.init.constant_(model.weight, math.nan)  # type: ignore[arg-type]
    assert "weight is not finite after 1 steps" in subject.problem(model, 1)
