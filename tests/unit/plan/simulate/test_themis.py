"""Themis: its paper's figures, times worked out by hand, and bounds that no schedule passes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dearmpi.chunk_orders import Crossing, DimensionWire, schedule, seconds
from dearmpi.plan.simulate.themis import (
    PAPER,
    TOPOLOGIES,
    ThemisRow,
    compare_themis,
    wire_of,
)

GIGABYTE = 1_000_000_000


@pytest.fixture(scope="module")
def mean() -> ThemisRow:
    return compare_themis()[-1]


@pytest.mark.parametrize("name", ["baseline", "fifo", "smallest"])
def test_links_are_used_as_in_the_paper(name: str, mean: ThemisRow) -> None:
    assert getattr(mean, name) == pytest.approx(getattr(PAPER, name), abs=0.03)


@pytest.mark.parametrize("name", ["fifo_gain", "smallest_gain"])
def test_gains_are_those_of_the_paper(name: str, mean: ThemisRow) -> None:
    assert getattr(mean, name) == pytest.approx(getattr(PAPER, name), rel=0.05)


def test_each_topology_has_1024_ranks() -> None:
    for dimensions in TOPOLOGIES.values():
        assert math.prod(dimension.num_ranks for dimension in dimensions) == 1024


def test_one_dimension_takes_its_bytes_and_its_steps() -> None:
    """4 ranks at 8 Gbit/s: 0.75 s for each half of 1 GB; a ring of 3 steps of 1 ms each way."""
    ring = wire_of(4, 8, 1_000_000, "ring")
    chunks = schedule([ring], GIGABYTE, is_even=True, num_chunks=1)
    assert chunks == [[Crossing(0, GIGABYTE), Crossing(0, GIGABYTE)]]
    assert seconds([ring], chunks, is_smallest_first=True) == pytest.approx(1.506)
    direct, switch = wire_of(4, 8, 1e6, "direct"), wire_of(4, 8, 1e6, "switch")
    assert seconds([direct], chunks, is_smallest_first=True) == pytest.approx(1.502)
    assert seconds([switch], chunks, is_smallest_first=True) == pytest.approx(1.504)


def test_the_second_chunk_crosses_the_idle_dimension_first() -> None:
    """Two dimensions of 2 ranks, 1 GB/s; a chunk of 1 GB takes 0.5 s, and its half 0.25 s."""
    equal = [wire_of(2, 8, 0, "ring"), wire_of(2, 8, 0, "ring")]
    chunks = schedule(equal, 2 * GIGABYTE, is_even=True, num_chunks=2)
    assert [[crossing.dimension for crossing in chunk] for chunk in chunks] == [
        [0, 1, 1, 0],
        [1, 0, 0, 1],
    ]
    # Both dimensions are busy all the time: with 2 x (0.5 + 0.25).
    assert seconds(equal, chunks, is_smallest_first=True) == pytest.approx(1.5)
    in_turn = schedule(equal, 2 * GIGABYTE, is_even=False, num_chunks=2)
    assert seconds(equal, in_turn, is_smallest_first=True) == pytest.approx(2.0)


def test_a_network_that_fits_the_baseline_gains_nothing() -> None:
    """The outer dimension has a P-th of the inner one's bandwidth, so that both are even."""
    fitting = [wire_of(16, 1600, 0, "switch"), wire_of(64, 100 * 63 / 60, 0, "switch")]
    chunks = schedule(fitting, GIGABYTE, is_even=True)
    assert {tuple(crossing.dimension for crossing in chunk) for chunk in chunks} == {(0, 1, 1, 0)}


DIMENSIONS = st.lists(
    st.builds(
        wire_of,
        num_ranks=st.sampled_from([2, 4, 8, 16]),
        gigabits=st.floats(10, 2000),
        step_ns=st.floats(0, 3000),
        kind=st.sampled_from(["ring", "direct", "switch"]),
    ),
    min_size=1,
    max_size=4,
)


@given(DIMENSIONS, st.sampled_from([1, 3, 16]), st.booleans(), st.booleans())
def test_all_bytes_cross_and_no_schedule_is_faster_than_its_wires(
    dimensions: list[DimensionWire], num_chunks: int, is_even: bool, is_smallest_first: bool
) -> None:
    chunks = schedule(dimensions, GIGABYTE, is_even=is_even, num_chunks=num_chunks)
    sent = [0.0] * len(dimensions)
    for chunk in chunks:
        half = len(chunk) // 2
        assert sorted(one.dimension for one in chunk[:half]) == list(range(len(dimensions)))
        assert chunk[half:] == chunk[:half][::-1]
        for one in chunk:
            size = dimensions[one.dimension].num_ranks
            sent[one.dimension] += one.nbytes * (size - 1) / size
    num_ranks = math.prod(one.num_ranks for one in dimensions)
    assert sum(sent) == pytest.approx(2 * GIGABYTE * (1 - 1 / num_ranks))
    taken_s = seconds(dimensions, chunks, is_smallest_first=is_smallest_first)
    busiest_s = max(part / one.rate for part, one in zip(sent, dimensions, strict=True))
    assert taken_s >= busiest_s * (1 - 1e-9)
