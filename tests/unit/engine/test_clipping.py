"""Norms that are no plain number, and those of nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.engine.scaling import shard_norm
from tests.fakes.ranks import run_ranks


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_no_kind_of_norm_loses_a_gradient_that_is_no_number(bad: int, norm_type: float) -> None:
    """Wherever it is, and on every rank, so that all of them leave the step out. Who takes it has,
    as with torch, no number left: not some that look as if they had been clipped.
    """

    def rank(world: World) -> tuple[bool, bool]:
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world, bucket_cap_mb=1e-6)
        factor = math.nan if world.rank == 1 else 1.0
        for number, layer in enumerate(model):
            inputs = torch.ones(1, 3)
            (layer(inputs).sum() * (factor if number == bad else 1.0)).backward()
        norm = optimizer.clip_grad_norm_(1.0, norm_type)
        optimizer.step()
        optimizer.close()
        left = torch.cat([param.detach().flatten() for param in model.parameters()])
        return bool(norm.isnan()), bool(left.isnan().all())

    assert run_ranks(3, rank) == [(True, True)] * 3


def test_a_norm_of_halves_may_be_larger_than_a_half() -> None:
    shards = [torch.full((4,), 6e4, dtype=torch.float16), torch.full((1,), 3.0)]
    assert shard_norm(shards, 2.0) ** 0.5 == pytest.approx(1.2e5, rel=1e-3)
    assert shard_norm(shards, math.inf) == pytest.approx(6e4, rel=1e-3)
    assert shard_norm([], math.inf) == 0.0


def line(world: World) -> tuple[nn.Module, DistributedOptimizer]:
    """A model of one weight, whose gradient is its input, and an optimizer that subtracts that."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, DistributedOptimizer(inner, model, world=world)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("size", [1, 2])
def test_the_norm_of_no_gradients_is_zero_with_a_warning(size: int, norm_type: float) -> None:
    """Where a script asks for it after the step, it logs zeros."""

    def rank(world: World) -> float:
        model, optimizer = line(world)
        for _ in range(2):
            assert optimizer.clip_grad_norm_(math.inf, norm_type) == 0.0
            optimizer.zero_grad()
            model(torch.tensor([3.0])).sum().backward()
            assert optimizer.clip_grad_norm_(1.0, norm_type) == 3.0
            assert optimizer.clip_grad_norm_(1.0, norm_type) == pytest.approx(1.0)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return float(model.state_dict()["weight"])

    with pytest.warns(UserWarning, match="between backward and step") as told:
        assert run_ranks(size, rank) == [pytest.approx(-2.0)] * size
    assert len(told) == 2


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_rank_without_gradients_clips_as_the_others_do(norm_type: float) -> None:
    def rank(world: World) -> float:
        model, optimizer = line(world)
        for step in range(2):
            if world.rank == step:
                model(torch.tensor([6.0])).sum().backward()
            assert optimizer.clip_grad_norm_(1.0, norm_type) == 3.0
            optimizer.step()
        optimizer.close()
        return float(model.state_dict()["weight"])

    assert run_ranks(2, rank) == [pytest.approx(-2.0)] * 2


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("why", ["frozen", "set to zero"])
def test_a_norm_may_be_zero_where_torch_has_gradients_of_zero_or_none_are_trained(
    size: int, why: str
) -> None:
    def rank(world: World) -> float:
        model, optimizer = line(world)
        model(torch.tensor([3.0])).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=why == "frozen")
        model.requires_grad_(why != "frozen")
        norm = float(optimizer.clip_grad_norm_(1.0))
        optimizer.step()
        optimizer.close()
        return norm

    assert run_ranks(size, rank) == [0.0] * size
