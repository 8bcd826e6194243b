"""Ranks that take part by weights, 0 included, train as one process with the weighted loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import Gather
from dearmpi.errors import ConfigError
from tests.codes import raises
from tests.fakes.ranks import run_ranks

WEIGHTS = (1.0, 3.0, 0.0)
NUM_STEPS = 4


def make_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.linspace(-1, 1, param.numel()).view(param.shape))
    return model


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    loss: Tensor = model(torch.randn(6, 5, generator=generator).double()).square().mean()
    return loss


def weight_of(step: int, rank: int) -> float:
    return WEIGHTS[(rank + step) % len(WEIGHTS)]


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_a_rank_without_a_batch_takes_part_with_weight_0(gather: Gather) -> None:
    def train(world: World) -> list[Tensor]:
        model = make_model()
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, world=world, gather=gather
        )
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            factor = world.loss_weight(weight_of(step, world.rank))
            if factor:
                (factor * loss_of(model, step, world.rank)).backward()
            optimizer.step()
        optimizer.close()
        return [param.detach().clone() for param in model.parameters()]

    alone = make_model()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        plain.zero_grad()
        losses = [weight_of(step, rank) * loss_of(alone, step, rank) for rank in range(3)]
        torch.autograd.backward(sum(losses[1:], losses[0]) / sum(WEIGHTS))
        plain.step()
    for found in run_ranks(3, train):
        for one, expected in zip(found, alone.parameters(), strict=True):
            torch.testing.assert_close(one, expected.detach(), rtol=1e-10, atol=1e-12)


def test_without_any_weight_nobody_counts_and_bad_ones_are_refused_by_all() -> None:
    def weigh(world: World) -> None:
        assert world.loss_weight(0.0) == 0.0
        assert world.loss_weight(2.0) == 1.0
        with raises(ConfigError, "out-of-range", "1 of 2 ranks"):
            world.loss_weight(-1.0 if world.rank else 1.0)
        with raises(ConfigError, "out-of-range", "2 ranks add up to"):
            world.loss_weight(1e308)
        assert world.loss_weight(5e-324 * (1 + 2 * world.rank)) == 0.5 + world.rank

    run_ranks(2, weigh)
