from __future__ import annotations

import pytest

from dearmpi.comm.backends.alone import AloneCollectives
from dearmpi.comm.world import World
from dearmpi.tune.ladder import LADDER, Run, climb
from tests.fakes.ranks import run_ranks


def prepare(numel: int, count: int) -> Run:
    """Operations that take a second per MiB and a millisecond more, without taking it."""
    return lambda num, window: num * (1e-3 + 4 * numel / 2**20) / window


@pytest.mark.parametrize(
    ("budget_s", "least_mb", "most_mb"),
    [
        (1.0, 0.5, 0.5),  # twice the second rung would take 9 s
        (27.0, 2.9, 3.0),  # 9 operations of 2.999 s
        (63.0, 4.0, 4.0),  # twice that would take 72 s
        (1000.0, 32.0, 32.0),
    ],
)
def test_the_last_size_is_as_large_as_the_time_allows(
    budget_s: float, least_mb: float, most_mb: float
) -> None:
    world = World(AloneCollectives(), progress="poll")
    (times,) = climb(world, [prepare], budget_s=budget_s)
    assert least_mb <= times[-1].nbytes / 2**20 <= most_mb
    assert [one.nbytes for one in times[:2]] == [rung.nbytes for rung in LADDER[:2]]
    for one in times:
        assert one.alone_s == pytest.approx(1e-3 + one.nbytes / 2**20)
        assert one.pair_s == pytest.approx(one.alone_s)
    world.close()


def test_the_slowest_rank_counts() -> None:
    """All ranks plan for its link, whichever of them it is."""

    def rank(world: World) -> list[float]:
        def prepare_here(numel: int, count: int) -> Run:
            run = prepare(numel, count)
            return lambda num, window: run(num, window) * (1 + world.rank)

        (times,) = climb(world, [prepare_here], budget_s=27.0)
        return [one.alone_s / (1e-3 + one.nbytes / 2**20) for one in times]

    for factors in run_ranks(2, rank):
        assert factors == pytest.approx([2.0] * len(factors)) and len(factors) >= 2
