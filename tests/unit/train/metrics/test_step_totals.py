"""Sums about each step that arrive while the next one computes."""

from __future__ import annotations

import math

import pytest

from dearmpi.comm.world import World
from dearmpi.train.metrics import step_times as module
from dearmpi.train.metrics.step_times import StepTotal, StepTotals
from tests.fakes.ranks import run_ranks


def test_each_step_is_read_once_in_order_with_the_mean_over_ranks() -> None:
    def work(world: World) -> list[StepTotal]:
        step_totals, read = StepTotals(world), []
        for step in (1, 2, 3):
            step_totals.post(step, loss=step + world.rank, stop=False)
            read += step_totals.read(pending=1)
        read += step_totals.read()
        step_totals.close()
        return read

    first, second = run_ranks(2, work)
    assert first == second
    assert [(total.step, total.loss) for total in first] == [(1, 1.5), (2, 2.5), (3, 3.5)]


def test_reading_with_one_pending_does_not_wait_for_the_newest() -> None:
    def work(world: World) -> int:
        step_totals = StepTotals(world)
        step_totals.post(1, loss=0.0, stop=False)
        before = len(step_totals.read(pending=1))
        step_totals.read()
        step_totals.close()
        return before

    assert run_ranks(2, work) == [0, 0]


def test_all_ranks_learn_of_a_bad_loss_and_of_a_stop_on_one() -> None:
    def work(world: World) -> StepTotal:
        step_totals = StepTotals(world)
        loss = math.inf if world.rank == 1 else 1.0
        step_totals.post(7, loss=loss, stop=world.rank == 2, num_saved=world.rank)
        (total,) = step_totals.read()
        step_totals.close()
        return total

    for total in run_ranks(3, work):
        assert (total.step, total.num_bad, total.num_stops, total.num_saved) == (7, 1, 1, 3)
        assert math.isnan(total.loss)
        assert total.describe_bad(["n0", "n1", "n2"]) == "1 of 3 ranks (rank 1 on n1)"
    assert StepTotal(7, math.nan, 2, 3, 0, 0).describe_bad(["n"] * 3) == "2 of 3 ranks"


def test_all_ranks_go_by_the_clock_of_rank_0() -> None:
    def work(world: World) -> float:
        step_totals = StepTotals(world)
        step_totals.post(1, loss=0.0, stop=False, clock_s=7.25 + world.rank)
        (total,) = step_totals.read()
        step_totals.close()
        return total.clock_s

    assert run_ranks(3, work) == [7.25] * 3


def test_after_a_long_step_all_ranks_read_the_newest_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long is what takes that long on the mean, be it long on one alone."""
    monkeypatch.setattr(module, "LONG_STEP_S", 1000.0)

    def work(world: World) -> list[int]:
        step_totals = StepTotals(world)
        delays = [step_totals.delay]
        for step, step_s in enumerate((0.0, 3000.0, 1500.0), 1):
            step_totals.post(step, loss=0.0, stop=False, step_s=step_s if world.rank else 0.0)
            step_totals.read()
            delays.append(step_totals.delay)
        step_totals.close()
        return delays

    assert run_ranks(2, work) == [[0, 1, 0, 1]] * 2
