"""What every rank spends on a step."""

from __future__ import annotations

from dearmpi.comm.world import World
from dearmpi.train.metrics.step_times import RankTimes, TimesExchange
from tests.fakes.ranks import run_ranks


def test_every_rank_learns_of_all_once() -> None:
    def work(world: World) -> list[tuple[RankTimes, ...]]:
        exchange = TimesExchange(world)
        before = exchange.read()
        exchange.share(RankTimes(1.0 + world.rank, 0.5, 0.25))
        seen = [before, exchange.read(), exchange.read()]
        exchange.close()
        return seen

    all_times = tuple(RankTimes(step_s, 0.5, 0.25) for step_s in (1.0, 2.0, 3.0))
    assert run_ranks(3, work) == [[(), all_times, ()]] * 3
