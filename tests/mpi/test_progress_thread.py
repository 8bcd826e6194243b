"""The thread that drives progress computes by itself; every other thread keeps torch's threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.device.comm_stream import compute_on_one_core

pytestmark = pytest.mark.ranks(2)


@pytest.fixture
def threads() -> Iterator[int]:
    """How many this test has torch compute with."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def test_a_thread_that_has_never_computed_keeps_to_one_core(
    world: World, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the progress thread of a fresh process, whose first sum comes later."""
    limited, computed = threading.Event(), threading.Event()
    seen: list[int] = []

    def drive(action: Callable[[], None]) -> None:
        def live() -> None:
            action()
            limited.set()
            computed.wait(60)
            sum_of = torch.ones(100_000)
            sum_of.add_(sum_of)
            seen.append(torch.get_num_threads())

        thread.append(threading.Thread(target=live))
        thread[0].start()
        limited.wait(60)

    thread: list[threading.Thread] = []
    monkeypatch.setattr(world, "on_progress_thread", drive)
    compute_on_one_core(world)
    computed.set()
    thread[0].join()
    assert seen == [1] and torch.get_num_threads() == threads


def test_sums_and_updates_take_one_core_and_computation_keeps_the_others(
    world: World, threads: int
) -> None:
    model = nn.Linear(3, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, world=world)
    seen: dict[str, int] = {}

    def look(where: str) -> None:
        seen[where] = torch.get_num_threads()

    world.on_progress_thread(lambda: look("driving"))
    if world.progress.mode == "thread":
        computation = world.progress.compute(lambda: look("background"))
        while not computation.test():
            time.sleep(0.001)
        assert seen.pop("background") == 1
    look("main")
    another = threading.Thread(target=look, args=("another",))
    another.start()
    another.join()
    assert seen == {"driving": 1, "main": threads, "another": threads}
    torch.set_num_threads(2)
    world.on_progress_thread(lambda: look("driving"))
    assert seen["driving"] == 1
    optimizer.close()
