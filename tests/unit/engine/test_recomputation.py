"""Activations that are computed again during backprop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill
from tests.mpi.oracle import batch, cut


class Recomputing(nn.Module):
    """Two halves, whose activations are computed again during backprop."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12)).double()
            for _ in range(3)
        )
        fill(self)

    def forward(self, inputs: torch.Tensor) -> Any:
        for half in self.halves:
            inputs = checkpoint(half, inputs, use_reentrant=False)
        return inputs


@pytest.mark.parametrize("cap_mb", [1e-6, 0.002, 1.0])
@pytest.mark.parametrize("eager", [False, True])
def test_activation_checkpointing(eager: bool, cap_mb: float) -> None:
    """Modules are called once more, in the middle of backprop."""

    def train(model: nn.Module, optimizer: Any, share: Callable[[int], slice], scale: int) -> Any:
        for step in range(4):
            inputs = batch(step, torch.float64)[0]
            optimizer.zero_grad()
            loss = model(inputs[share(len(inputs))]).square().sum() * scale
            loss.backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    alone = Recomputing()
    expected = train(alone, torch.optim.SGD(alone.parameters(), lr=0.001), slice, 1)

    def rank(world: World) -> Any:
        model = Recomputing()
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.001),
            model,
            world=world,
            eager=eager,
            bucket_cap_mb=cap_mb,
        )
        found = train(model, optimizer, lambda n: cut(n, world.size)[world.rank], world.size)
        optimizer.close()
        return found

    for found in run_ranks(2, rank):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-13)
