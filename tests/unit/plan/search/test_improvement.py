"""How many buckets a plan has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dearmpi.plan.search.planner import make_plan
from tests.unit.plan.hosts import HOSTS, paper


def test_costly_buckets_make_few() -> None:
    profile = paper("equal:100:24", 0.5)
    cheap = make_plan(profile, HOSTS, world_size=4, eager=True)
    dear_ones = replace(HOSTS, main_thread_s=0.05)
    costly = make_plan(profile, dear_ones, world_size=4, eager=True)
    assert len(costly.buckets) < len(cheap.buckets)


def test_buckets_that_gain_nothing_are_merged() -> None:
    profile = paper("equal:200:64", 0.5)
    link = replace(HOSTS.reduce_scatter, alpha_s=0.0)
    free = replace(HOSTS, reduce_scatter=link, all_gather=link, update_s=0.0, main_thread_s=0.0)
    made = make_plan(profile, free, world_size=4, eager=True)
    assert len(made.buckets) < 32  # 64 cost no more in simulation, but posts and polls do
    assert made.prediction.iteration_s <= 1.005 * made.prediction.bound_s


@pytest.mark.slow
def test_buckets_are_merged_whose_gathers_were_tied_one_by_one() -> None:
    """With the gathers' order that is best for fewer buckets, and not with DeAR's own."""
    costs = replace(
        HOSTS, main_thread_s=1e-3, update_s_per_byte=0.65e-9
    )  # as where a job plans for itself
    made = make_plan(paper("densenet201", 2.0), costs, world_size=4, eager=True)
    assert len(made.buckets) <= 10
    assert made.prediction.iteration_s <= 1.003 * made.prediction.bound_s
