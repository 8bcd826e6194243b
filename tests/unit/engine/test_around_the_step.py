"""What scripts do to parameters after each step by references to them, with ``synchronize()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import Gather
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill
from tests.mpi.semantics import slow_adam


class Average:
    """Of parameters that it keeps references to, as torch_ema does."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        self.values = [param.detach().clone() for param in params]

    @torch.no_grad()
    def after(self, step: int) -> None:
        for value, param in zip(self.values, self.params, strict=True):
            value.lerp_(param, 0.5)


class Lookahead(Average):
    """Sets parameters back to their average in every second step."""

    def after(self, step: int) -> None:
        if step % 2:
            super().after(step)
            for value, param in zip(self.values, self.params, strict=True):
                param.data.copy_(value)


@pytest.mark.parametrize("make", [Average, Lookahead])
@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_references_to_parameters_are_current_after_synchronize(
    gather: Gather, make: type[Average]
) -> None:
    def train(world: World | None) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        fill(model)
        optimizer: Any = slow_adam(model)
        if world is not None:
            optimizer = DistributedOptimizer(optimizer, model, world=world, gather=gather)
        outer = make(list(model.parameters()))
        for step in range(4):
            optimizer.zero_grad()
            inputs = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64).view(2, 3) * (1 + step)
            model(inputs if world is None else inputs[world.rank]).square().mean().backward()
            optimizer.step()
            if world is not None:
                optimizer.synchronize()
                assert all(param.grad is None for param in outer.params)
            outer.after(step)
        if world is not None:
            optimizer.close()
        return [*outer.values, *(value.clone() for value in model.state_dict().values())]

    expected = train(None)
    for found in run_ranks(2, train):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)
