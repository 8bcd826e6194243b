"""What methods are measured on: a task's samples, and what is wrong with a model at the end."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from dearmpi.bench.workload_model import ReplayedModel, task_model
from dearmpi.config import SPARSE, CommDtype, Compress
from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.model.profile import profile_workload
from dearmpi.train.tasks.task import Task


def test_each_rank_of_a_task_has_samples_of_its_own() -> None:
    samples = [torch.tensor([float(number)]) for number in range(24)]
    task = Task("numbers", nn.Linear(1, 1), samples, lambda model, batch: model(batch).mean())
    subjects = [task_model(task, batch_size=3, rank=rank, world_size=2) for rank in range(2)]
    seen = [set(torch.cat(subject.batches).flatten().tolist()) for subject in subjects]
    assert not seen[0] & seen[1]
    assert seen[0] | seen[1] == {float(number) for number in range(24)}


def subject_of(rank: int, world_size: int) -> ReplayedModel:
    profile = profile_workload(read_workload("equal:0.01:2"), feed_forward_s=0, backprop_s=0)
    return ReplayedModel(profile, batch_size=1, rank=rank, world_size=world_size)


def gradients(world_size: int) -> list[float]:
    """That of each rank."""
    found = []
    for rank in range(world_size):
        model = subject_of(rank, world_size).build()
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        (value,) = {
            float(grad.flatten()[0]) for p in model.parameters() if (grad := p.grad) is not None
        }
        found.append(value)
    return found


def trained(world_size: int, gradient: float, *, num_steps: int, comm_dtype: CommDtype) -> str:
    """What is wrong with a model that took this gradient in each of its steps."""
    subject = subject_of(0, world_size)
    model = subject.build()
    for param in model.parameters():
        nn.init.constant_(param, -1e-3 * num_steps * gradient)
    return subject.problem(model, num_steps, comm_dtype=comm_dtype)


@pytest.mark.parametrize("compress", get_args(Compress))
@pytest.mark.parametrize("density", [1.0, 0.1])
@pytest.mark.parametrize(("part", "is_right"), [(1.0, True), (0.0, False), (1.2, False)])
def test_compressed_or_not_a_model_has_to_come_its_way(
    compress: str, density: float, part: float, is_right: bool
) -> None:
    """``part`` of what five steps bring: all of it, or of each tenth what has gathered by then."""
    subject, num_steps = subject_of(0, 2), 5
    if compress not in SPARSE:
        density = 1.0
    share = 1.0 if density == 1.0 else density * (num_steps + 1) / 2
    model = subject.build()
    gradient = sum(gradients(2)) / 2
    factor = part * share if part <= 1.0 else part  # beyond the whole way
    for param in model.parameters():
        nn.init.constant_(param, -1e-3 * num_steps * gradient * factor)
    problem = subject.problem(model, num_steps, compress=compress, density=density)
    assert (problem == "") == is_right, problem


def added(parts: list[Tensor], first: int) -> Tensor:
    """Their sum along a ring that begins at ``first``, in their own precision."""
    whole = parts[first].clone()
    for part in parts[first + 1 :] + parts[:first]:
        whole += part
    return whole


@pytest.mark.parametrize("comm_dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("world_size", range(2, 17))
def test_sums_in_half_precision_are_right_however_long_a_block_is(
    world_size: int, comm_dtype: CommDtype
) -> None:
    """A ring's, begun at any rank: torch's hook divides before it sums, this engine after it."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[comm_dtype]
    whole = torch.tensor(gradients(world_size)).to(half)
    for first in range(world_size):
        divided = float(added(list(whole / world_size), first))
        summed = float(added(list(whole), first)) / world_size
        for mean in (divided, summed):
            problem = trained(world_size, mean, num_steps=900, comm_dtype=comm_dtype)
            assert problem == "", (first, mean)


@pytest.mark.parametrize(
    ("world_size", "comm_dtype"), [(2, "bf16"), (7, "bf16"), (8, "fp16"), (9, "fp32"), (15, "fp32")]
)
def test_a_step_too_few_is_found_out_in_a_long_block(
    world_size: int, comm_dtype: CommDtype
) -> None:
    mean = sum(gradients(world_size)) / world_size
    for num_steps, is_right in ((400, True), (399, False)):
        problem = trained(world_size, mean * num_steps / 400, num_steps=400, comm_dtype=comm_dtype)
        assert (problem == "") == is_right


@pytest.mark.parametrize("comm_dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("world_size", [2, 9, 16, 1000])
def test_a_model_that_averaged_nothing_is_found_out_on_any_number_of_ranks(
    world_size: int, comm_dtype: CommDtype
) -> None:
    for gradient in (0.0, 1.0):
        assert "not -" in trained(world_size, gradient, num_steps=100, comm_dtype=comm_dtype)


@pytest.mark.parametrize(("half", "steps"), [(torch.bfloat16, 304), (torch.float16, 1999)])
def test_parameters_that_were_gathered_in_half_precision_have_trained(
    half: torch.dtype, steps: int
) -> None:
    """After many steps what half precision cannot show is more than half a step."""
    subject = subject_of(0, 4)
    model, learning_rate = subject.build(), 1e-3
    trained = -learning_rate * steps * sum(gradients(4)) / 4
    for shown, is_right in (
        (trained, True),
        (float(torch.tensor(trained).to(half)), True),
        (trained * (1 - 1 / steps), False),
        (float(torch.tensor(trained * 0.98).to(half)), False),
    ):
        for param in model.parameters():
            nn.init.constant_(param, shown)
        assert (subject.problem(model, steps) == "") == is_right


def test_a_model_that_is_not_finite_has_not_trained() -> None:
    task = Task("one", nn.Linear(1, 1), [torch.ones(1)], lambda model, batch: model(batch).mean())
    subject = task_model(task, batch_size=1, rank=0, world_size=1)
    model = subject.build()
    assert subject.problem(model, 1) == ""
    nn.init.constant_(model.weight, math.nan)  # type: ignore[arg-type]
    assert "weight is not finite after 1 steps" in subject.problem(model, 1)
