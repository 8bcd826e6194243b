"""Allocation: never behind a search over a grid, and never behind what is simpler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dearmpi.plan.simulate.allocation import (
    Worker,
    allocate_band,
    allocate_evenly,
    allocate_jointly,
    allocate_load,
    compare_allocations,
    spread_workers,
)

TIMES = st.floats(0.01, 100.0)
WORKERS = st.lists(st.builds(Worker, TIMES, TIMES), min_size=1, max_size=6)
GRID = 60


def parts(count: int) -> Iterator[tuple[float, ...]]:
    """All divisions of 1 into three parts of a multiple of 1/``count`` each, none of them 0."""
    for first in range(1, count - 1):
        for second in range(1, count - first):
            yield first / count, second / count, (count - first - second) / count


def round_s(workers: Sequence[Worker], loads: Sequence[float], bands: Sequence[float]) -> float:
    return max(
        load * (w.send_s / band + w.compute_s)
        for w, load, band in zip(workers, loads, bands, strict=True)
    )


@given(WORKERS)
def test_joint_is_not_behind_each_alone_which_is_not_behind_even(workers: list[Worker]) -> None:
    even = allocate_evenly(workers)
    band = allocate_band(workers, even.loads)
    load = allocate_load(workers, even.bands)
    joint = allocate_jointly(workers)
    exact = 1 + 1e-9
    assert joint.round_s <= min(band.round_s, load.round_s) * exact
    assert max(band.round_s, load.round_s) <= even.round_s * exact
    for one in (even, band, load, joint):
        assert sum(one.loads) == pytest.approx(1) and sum(one.bands) == pytest.approx(1)
        assert min(one.loads) >= 0 and min(one.bands) >= 0


@given(st.lists(st.builds(Worker, TIMES, TIMES), min_size=3, max_size=3))
def test_no_allocation_of_a_grid_is_better(workers: list[Worker]) -> None:
    """For given bands the best loads are those of ``allocate_load``, which a grid checks too."""
    third = (1 / 3,) * 3
    found = min(allocate_load(workers, bands).round_s for bands in parts(GRID))
    assert allocate_jointly(workers).round_s <= found * (1 + 1e-6)
    by_band = min(round_s(workers, third, bands) for bands in parts(GRID))
    assert allocate_band(workers, third).round_s <= by_band * (1 + 1e-6)
    by_load = min(round_s(workers, loads, third) for loads in parts(GRID))
    assert allocate_load(workers, third).round_s <= by_load * (1 + 1e-6)


def test_of_two_workers_the_joint_round_is_that_of_the_finest_grid() -> None:
    workers = [Worker(1.0, 0.5), Worker(0.2, 2.0)]
    found = min(
        allocate_load(workers, (part / 20_000, 1 - part / 20_000)).round_s
        for part in range(1, 20_000)
    )
    assert allocate_jointly(workers).round_s == pytest.approx(found, rel=1e-6)


def test_a_worker_whose_link_is_hopeless_gets_nothing() -> None:
    joint = allocate_jointly([Worker(0.1, 1.0), Worker(0.1, 1.0), Worker(1e6, 1.0)])
    assert joint.loads[2] == joint.bands[2] == 0
    assert joint.loads[0] == pytest.approx(0.5)


def test_gains_grow_with_the_spread_and_reach_those_that_the_paper_claims() -> None:
    rows = compare_allocations()
    gains = [1 - row.joint / row.even for row in rows]
    assert gains == sorted(gains) and gains[0] == pytest.approx(0) and gains[-1] >= 0.46
    for row in rows[1:]:
        assert row.joint < min(row.band, row.load) and max(row.band, row.load) < row.even
        assert row.samples < 1
    assert [w.compute_s for w in spread_workers(1.0)] == [1.0] * 8
