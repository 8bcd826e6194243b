"""What failures cost a job, against failures that are drawn."""

from __future__ import annotations

import random

import pytest

from dearmpi.errors import ConfigError
from dearmpi.plan.model.failures import best_interval, cost_of_failures, share_lost


@pytest.mark.parametrize(
    ("mtbf_s", "checkpoint_s", "restart_s", "interval_s"),
    [(44_640.0, 1.0, 300.0, 298.0), (3600.0, 60.0, 600.0, 700.0), (1000.0, 100.0, 0.0, 300.0)],
)
def test_the_share_lost_is_that_of_failures_that_are_drawn(
    mtbf_s: float, checkpoint_s: float, restart_s: float, interval_s: float
) -> None:
    draw = random.Random(1)
    total_s = useful_s = 0.0
    for _ in range(40_000):  # from a failure to the next: a restart, then segments
        until_failure_s = draw.expovariate(1 / mtbf_s)
        total_s += until_failure_s
        whole = int((until_failure_s - restart_s) / (interval_s + checkpoint_s))
        useful_s += max(whole, 0) * interval_s
    lost = share_lost(interval_s, mtbf_s=mtbf_s, checkpoint_s=checkpoint_s, restart_s=restart_s)
    assert lost == pytest.approx(1 - useful_s / total_s, rel=0.05)


@pytest.mark.parametrize("checkpoint_s", [1.0, 30.0, 600.0])
def test_no_other_interval_loses_less(checkpoint_s: float) -> None:
    mtbf_s, restart_s = 3600.0, 120.0

    def lost(interval_s: float) -> float:
        return share_lost(interval_s, mtbf_s=mtbf_s, checkpoint_s=checkpoint_s, restart_s=restart_s)

    least = min(lost(1.05**power) for power in range(200))
    assert lost(best_interval(checkpoint_s, mtbf_s)) <= least + 0.002


def test_4096_ranks_of_llama_3s_machines() -> None:
    """50,700 h between interruptions of a GPU, as in arXiv 2407.21783 (419 in 54 days)."""
    cost = cost_of_failures(4096, rank_mtbf_s=50_700 * 3600, checkpoint_s=1, restart_s=300)
    assert cost.mtbf_s / 3600 == pytest.approx(12.4, abs=0.05)
    assert cost.interval_s == pytest.approx(298, abs=1)
    assert cost.lost == pytest.approx(0.0067 + 0.0067, abs=0.0002)


@pytest.mark.parametrize("given", [(0.0, 1.0, 1.0), (1e6, 0.0, 1.0), (1e6, 1.0, -1.0)])
def test_times_out_of_range(given: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError) as caught:
        cost_of_failures(4, rank_mtbf_s=given[0], checkpoint_s=given[1], restart_s=given[2])
    assert caught.value.code == "out-of-range"


def test_a_job_that_fails_faster_than_it_restarts() -> None:
    with pytest.raises(ConfigError, match="250 s on average.* 310 s") as caught:
        cost_of_failures(4, rank_mtbf_s=1000, checkpoint_s=10, restart_s=300)
    assert caught.value.code == "out-of-range"
