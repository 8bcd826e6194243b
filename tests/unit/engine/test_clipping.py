"""Norms that are no plain number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.ranks import run_ranks
from dearmpi.comm.world import World
from dearmpi.engine.clipping import shard_norm


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
