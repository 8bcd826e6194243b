"""The thread that drives progress computes by itself; every other thread keeps torch's threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World

pytestmark = pytest.mark.ranks(2)


@pytest.fixture
def threads() -> Iterator[int]:
    """How many this test has torch compute with."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def test_sums_and_updates_take_one_core_and_computation_keeps_the_others(
    world: World, threads: int
) -> None:
    model = nn.Linear(3, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, world=world)
    seen: dict[str, int] = {}

    def look(where: str) -> None:
        seen[where] = torch.get_num_threads()

    world.on_driving_thread(lambda: look("driving"))
    look("main")
    another = threading.Thread(target=look, args=("another",))
    another.start()
    another.join()
    assert seen == {"driving": 1, "main": threads, "another": threads}
    torch.set_num_threads(2)
    world.on_driving_thread(lambda: look("driving"))
    assert seen["driving"] == 1
    optimizer.close()
