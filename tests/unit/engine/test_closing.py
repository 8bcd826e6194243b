"""What is under way when a DistributedOptimizer is closed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from tests.fakes.ranks import run_ranks


def test_closing_before_the_step_leaves_an_ordinary_model() -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, world=world
        )
        model(torch.ones(1, 3)).sum().backward()
        optimizer.close()
        model(torch.ones(1, 3)).sum().backward()
        assert model.weight.grad is not None and model.weight.grad.tolist() == [[1.0] * 3] * 2

    run_ranks(2, rank)


@pytest.mark.parametrize("between", ["nothing", "clearing", "lr"])
def test_closing_before_an_eager_step_takes_it_whole(between: str) -> None:
    """Where a layer has no gradient on any rank, the buckets behind it wait for the step."""

    def rank(world: World) -> list[float]:
        model = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(3)])
        params = list(model.parameters())
        for param in params:
            nn.init.zeros_(param)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model,
            world=world,
            eager=True,
            bucket_cap_mb=1e-5,  # a bucket each
        )
        (model[2](torch.ones(1, 8)).sum() + model[0](torch.ones(1, 8)).sum()).backward()
        if between == "clearing":
            for param in params:
                param.grad = None
        elif between == "lr":  # which comes too late
            optimizer.param_groups[0]["lr"] = 2.0
        optimizer.close()
        return [value for param in model.parameters() for value in param[:, 0].tolist()]

    assert run_ranks(2, rank) == [[-1.0] * 8 + [0.0] * 8 + [-1.0] * 8] * 2
