"""What every rank spends on a step, and which one holds the others up."""

from __future__ import annotations

import pytest

from dearmpi.comm.ranks import run_ranks
from dearmpi.comm.world import World
from dearmpi.train.rank_times import RankTimes, TimesExchange, find_straggler


def times(*pairs: tuple[float, float]) -> list[RankTimes]:
    """From (own_s, wait_s) of each rank."""
    return [RankTimes(own_s + wait_s, wait_s) for own_s, wait_s in pairs]


def test_the_rank_for_which_the_others_wait_is_found() -> None:
    found = find_straggler(times((0.1, 0.15), (0.11, 0.14), (0.25, 0.0), (0.1, 0.15)))
    assert found is not None and found.rank == 2
    assert (found.own_s, found.typical_s) == pytest.approx((0.25, 0.1))
    assert found.waited_s == pytest.approx(0.15)


@pytest.mark.parametrize(
    "ranks",
    [
        times((0.5, 0.0)),
        times((0.1, 0.01), (0.11, 0.0)),  # no two machines are alike
        times((0.1, 0.0), (0.3, 0.0)),  # nobody waits for it
        times((0.1, 0.4), (0.2, 0.4)),  # it waits for the network as long as the others
        [],
    ],
)
def test_differences_that_harm_nobody_are_not_told(ranks: list[RankTimes]) -> None:
    assert find_straggler(ranks) is None


def test_every_rank_learns_of_all_once() -> None:
    def work(world: World) -> list[tuple[RankTimes, ...]]:
        exchange = TimesExchange(world)
        before = exchange.read()
        exchange.share(RankTimes(1.0 + world.rank, 0.5))
        seen = [before, exchange.read(), exchange.read()]
        exchange.close()
        return seen

    all_times = (RankTimes(1.0, 0.5), RankTimes(2.0, 0.5), RankTimes(3.0, 0.5))
    assert run_ranks(3, work) == [[(), all_times, ()]] * 3
