"""Which reduce-scatter is chosen: the one whose slowest rank is the fastest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest

from dearmpi.comm.algorithms import registry as selection
from dearmpi.comm.messages.values import HostBuffer
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig, ReduceScatter
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks

SECONDS = {
    "native": (1.0, 9.0),  # by rank
    "ring": (4.0, 4.0),
    "exchange": (5.0, 2.0),
}


class Named:
    """Collectives that start nothing, and answer with the algorithm that was asked for."""

    def start_reduce_scatter(self, _: Any, algorithm: str, **__: Any) -> str:
        return algorithm

    start_all_gather = start_reduce_scatter


def test_the_slowest_rank_s_best_of_a_few_trials_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def run_all(world: World, _: Any, starts: list[Callable[[Any], str]]) -> float:
        algorithm = starts[0](Named())
        tried.append((world.rank, algorithm))
        is_first = tried.count((world.rank, algorithm)) == 1
        late_s = 9.0 if is_first and algorithm == "ring" else 0.0  # as something held it up
        return SECONDS.get(algorithm, (10.0, 10.0))[world.rank] + late_s

    monkeypatch.setattr(selection, "run_all", run_all)

    def rank(world: World) -> str:
        buffer = HostBuffer(np.zeros(world.size, np.float32))
        return selection.select_reduce_scatter(world, buffer)

    assert run_ranks(2, rank) == ["ring", "ring"]
    assert {algorithm for _, algorithm in tried} == set(get_args(ReduceScatter))


@pytest.mark.parametrize(
    ("grid_s", "hosts", "expected"),
    [(1.85, "aabb", "2x2"), (1.93, "aabb", "None"), (0.1, "abcd", "None"), (0.1, "aaab", "None")],
)
@pytest.mark.filterwarnings("ignore:topology")
def test_auto_takes_a_grid_that_gains_three_percent(
    grid_s: float, hosts: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_all(world: World, _: Any, starts: list[Callable[[Any], str]]) -> float:
        is_flat = starts[0](Named()) == "ring"
        return 2.0 if is_flat else grid_s + 0.05 * (world.rank == 1)

    monkeypatch.setattr(selection, "run_all", run_all)

    def rank(world: World) -> str:
        def make_buffer() -> HostBuffer:
            return HostBuffer(np.zeros(world.size, np.float32))

        grid, told = selection.select_grid(world, EngineConfig(topology="auto"), make_buffer)
        assert not told or told == (
            f"measured: both operations on 1.6e-05 MB take {1e3 * (grid_s + 0.05) * 2:.4g} ms by "
            "2x2, and 4000 ms flat"
        )
        return str(grid)

    assert run_ranks(4, rank, hub=FakeHub(4, hosts=list(hosts))) == [expected] * 4
