"""What every rank spends on a step."""

from __future__ import annotations

import pytest

from dearmpi.comm.world import World
from dearmpi.train.metrics.step_times import Meter, RankTimes, Sums, TimesExchange
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


def test_the_first_step_counts_in_its_row_and_not_in_the_rate_of_the_run() -> None:
    meter = Meter()
    meter.wait(1.0)
    meter.add(Sums(1, 8, 10.0, exposed_s=4.0))
    meter.add(Sums(1, 4, 2.0, exposed_s=0.5))
    meter.wait(1.0)  # for what the last step sent, outside of steps
    assert (meter.interval.num_samples, meter.interval.seconds) == (12, 14.0)
    assert (meter.steady.num_steps, meter.steady.exposed_s) == (1, 0.5)
    assert meter.steady.samples_per_s == pytest.approx(4 / 3)
    assert meter.seconds == 14.0


def test_a_lap_begins_the_next_row_and_leaves_the_run_as_it_is() -> None:
    meter = Meter()
    for _ in range(3):
        meter.add(Sums(1, 8, 2.0))
    assert meter.lap().samples_per_s == 4.0
    assert meter.interval.samples_per_s == 0.0
    meter.add(Sums(1, 8, 4.0))
    meter.wait(4.0)
    assert meter.lap().samples_per_s == 1.0
    assert meter.steady.samples_per_s == pytest.approx(24 / 12)
    assert meter.seconds == 14.0
