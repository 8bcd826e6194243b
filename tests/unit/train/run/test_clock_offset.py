"""Clocks of ranks: the true offset lies within the bounds that are told."""

from __future__ import annotations

import time

from dearmpi.comm.world import World
from dearmpi.train.run.tracing import ClockOffset, measure_clock
from tests.fakes.ranks import run_ranks


def test_the_offset_is_found_within_its_uncertainty() -> None:
    def work(world: World) -> ClockOffset:
        return measure_clock(world, now=lambda: time.perf_counter() + 100.0 * world.rank)

    clocks = run_ranks(3, work)
    assert clocks[0] == ClockOffset(0.0, 0.0)
    for rank, clock in enumerate(clocks):
        assert abs(clock.offset_s + 100.0 * rank) <= clock.uncertainty_s + 1e-9
        assert clock.uncertainty_s < 1.0


def test_times_count_from_each_ranks_own_origin() -> None:
    def work(world: World) -> ClockOffset:
        return measure_clock(world, origin_s=-40.0 * world.rank)

    clock = run_ranks(2, work)[1]
    assert abs(clock.offset_s + 40.0) <= clock.uncertainty_s + 1e-9
