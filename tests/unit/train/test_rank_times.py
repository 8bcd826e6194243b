"""What every rank spends on a step."""

from __future__ import annotations

from dearmpi.comm.ranks import run_ranks
from dearmpi.comm.world import World
from dearmpi.train.rank_times import RankTimes, TimesExchange


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
