"""Gradients that do not come, of frozen layers and forgetful functions, as in plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill
from tests.mpi.oracle import Case, Training
from tests.unit.engine.same_as_alone import EVERY_WAY, assert_same_as_alone


@pytest.mark.parametrize("schedule", ["dear", "wfbp", "serial"])
@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_parts_of_a_bucket_that_are_frozen_and_unfrozen_by_turns(
    schedule: Any, gather: Any
) -> None:
    """Clipping sees all of a bucket, and so must know what nobody has a gradient for."""

    def script(training: Training) -> None:
        params = list(training.model.parameters())
        for step in range(6):
            training.optimizer.zero_grad()
            for param in params[: len(params) // 2]:
                param.requires_grad_(step % 3 != 1)
            training.backward(step)
            for param in params[: len(params) // 2]:
                param.requires_grad_(step % 3 == 0)
            training.backward(step + 1)
            training.clip(0.5)
            training.optimizer.step()

    assert_same_as_alone(script, Case(schedule=schedule, gather=gather, cap_mb=8.0))


@EVERY_WAY
def test_a_layer_that_is_frozen_after_the_feed_forward(case: Case) -> None:
    """Autograd calls the hooks of its gradients, and there are none."""

    def script(training: Training) -> None:
        params = list(training.model.parameters())
        for step in range(4):
            training.optimizer.zero_grad()
            loss = training.loss(step)
            for param in params[::2]:
                param.requires_grad_(step % 2 == 0)
            loss.backward()
            for param in params[::2]:
                param.requires_grad_(True)
            training.optimizer.step()

    for cap_mb in (0.0001, 8.0):
        assert_same_as_alone(script, replace(case, cap_mb=cap_mb))


class Forgetful(torch.autograd.Function):
    """A product whose second factor gets no gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return inputs * scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0], None


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))
        fill(self)

    def forward(self, inputs: Tensor) -> Any:
        return Forgetful.apply(self.layer(inputs), self.scale)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("num_backprops", [1, 2])
def test_a_function_that_gives_no_gradient_for_a_parameter(num_backprops: int) -> None:
    def train(world: World | None) -> list[Tensor]:
        model = Scaled()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        if world is not None:
            optimizer = DistributedOptimizer(optimizer, model, world=world)
        for step in range(3):
            optimizer.zero_grad()
            for number in range(num_backprops):
                model(torch.full((1, 3), 1.0 + step + number)).square().sum().backward()
            optimizer.step()
        found = [value.clone() for value in model.state_dict().values()]
        if world is not None:
            optimizer.close()
        return found

    for found in run_ranks(2, train):
        torch.testing.assert_close(found, train(None))


@EVERY_WAY
def test_zero_grad_to_zeros_of_what_is_frozen_then(case: Case) -> None:
    """It decays on."""

    def script(training: Training) -> None:
        params = list(training.model.parameters())
        for step in range(4):
            training.optimizer.zero_grad(set_to_none=False)
            for param in params[::2]:
                param.requires_grad_(step < 2)
            training.backward(step)
            training.optimizer.step()

    assert_same_as_alone(script, replace(case, cap_mb=8.0))


@EVERY_WAY
def test_gradients_that_were_set_to_none_are_not_zero_later(case: Case) -> None:
    """torch's step leaves out the first kind, and has the second decay on."""

    def script(training: Training) -> None:
        sets_to_none = (True, True, False, False, True, False)
        for step, to_none in enumerate(sets_to_none):
            training.optimizer.zero_grad(set_to_none=to_none)
            training.backward(step if step in (0, 3) else 1)
            training.optimizer.step()

    assert_same_as_alone(script, replace(case, model="branches"))
