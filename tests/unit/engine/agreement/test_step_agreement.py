"""Which parameters had a gradient on any rank is told for each step by itself."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from tests.fakes import FakeClock, FakeHub, Fault
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill


class Detour(nn.Module):
    """Two layers, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        fill(self)

    def forward(self, inputs: torch.Tensor, *, whole: bool) -> Any:
        hidden = self.first(inputs)
        return (self.second(hidden) if whole else hidden).square().mean()


def test_a_roll_call_that_comes_late_does_not_speak_for_the_next_step() -> None:
    """Rank 0 hears only during the second backprop that all had gradients in the first."""
    clock = FakeClock()
    together = threading.Barrier(2)

    def poll(world: World, *, seconds: float = 0.0) -> None:
        """Let all ranks post what they can, then let rank 0 hear what it may by now."""
        for _ in range(5):
            world.progress.poll()
            together.wait(60)
        if world.is_root:
            clock.advance(seconds)
            world.progress.poll()
        together.wait(60)

    def train(world: World | None) -> list[Any]:
        model = Detour()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        if world is not None:
            optimizer = DistributedOptimizer(optimizer, model, world=world)
        for whole in (True, False, True):
            optimizer.zero_grad()
            model(torch.ones(1, 3), whole=whole).backward()
            if world is not None and not whole:
                poll(world, seconds=1.0)  # the first roll call arrives
            optimizer.step()
            if world is not None and not whole:
                poll(world)  # everything arrives but the second roll call
                poll(world, seconds=1.0)
        return [value.clone() for value in model.state_dict().values()]

    late = [Fault(0, "delay", nth=nth, label="AR", delay_s=1.0) for nth in (1, 2)]
    expected = train(None)
    hub = FakeHub(2, clock=clock.now, faults=late)
    for found in run_ranks(2, train, hub=hub, progress="poll"):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
