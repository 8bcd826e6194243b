"""Batch shares: samples by rank, nothing lost, and changes that pay alone."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dearmpi.batch_shares import BatchShare, faster_sizes, fastest_sizes, share_range, share_sizes

WEIGHTS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=9)


@given(WEIGHTS, st.integers(0, 500), st.integers(0, 3))
def test_sizes_sum_up_and_are_within_one_of_their_part(
    weights: list[float], count: int, least: int
) -> None:
    sizes = share_sizes(count, weights)
    assert sum(sizes) == count
    ideal = [count * weight / sum(weights) for weight in weights]
    assert all(abs(size - part) < 1.0 + 1e-9 for size, part in zip(sizes, ideal, strict=True))
    if count >= least * len(weights):
        sizes = share_sizes(count, weights, least=least)
        assert sum(sizes) == count and min(sizes) >= least


@given(WEIGHTS, st.integers(0, 200))
def test_ranges_touch_and_no_rank_is_without_while_there_are_enough(
    weights: list[float], count: int
) -> None:
    ranges = [share_range(count, weights, rank) for rank in range(len(weights))]
    assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == count
    assert count < len(weights) or all(begin < end for begin, end in ranges)


def test_remainders_go_to_lower_ranks_and_sizes_repeat_themselves() -> None:
    assert share_sizes(10, [1, 1, 1, 1]) == (3, 3, 2, 2)
    assert share_sizes(10, [2, 1, 1, 1]) == (4, 2, 2, 2)
    for sizes in product(range(1, 8), repeat=3):
        assert share_sizes(sum(sizes), sizes) == sizes


@given(
    st.integers(3, 14),
    st.lists(st.floats(0.1, 5.0), min_size=3, max_size=3),
    st.lists(st.floats(0.0, 20.0), min_size=3, max_size=3),
    st.integers(0, 1),
)
def test_no_other_sizes_end_earlier(
    count: int, per_sample: list[float], fixed: list[float], least: int
) -> None:
    def end(sizes: tuple[int, ...]) -> float:
        return max(f + n * s for f, n, s in zip(fixed, sizes, per_sample, strict=True) if n)

    found = fastest_sizes(count, per_sample, fixed, least=least)
    assert sum(found) == count and min(found) >= least
    every = (
        (first, second, count - first - second)
        for first in range(least, count + 1)
        for second in range(least, count - first - least + 1)
    )
    assert end(found) <= min(map(end, every)) + 1e-9


def seconds_of(sizes: tuple[int, ...], per_sample: list[float], fixed: float) -> list[float]:
    return [size * one + fixed for size, one in zip(sizes, per_sample, strict=True)]


@pytest.mark.parametrize(
    ("slow", "gain"), [(2.0, 1.72), (1.3, 1.2), (8.0, 6.0)], ids=["twice", "a third", "8 times"]
)
def test_a_slow_rank_gets_what_it_computes_in_time(slow: float, gain: float) -> None:
    per_sample = [1.0, slow, 1.0, 1.0]
    even = (32, 32, 32, 32)
    sizes = faster_sizes(even, seconds_of(even, per_sample, 0.0))
    before, after = (max(seconds_of(each, per_sample, 0.0)) for each in (even, sizes))
    assert before / after >= gain
    assert faster_sizes(sizes, seconds_of(sizes, per_sample, 0.0)) == sizes


def test_what_does_not_grow_with_samples_takes_some_changes_more() -> None:
    per_sample = [1.0, 2.0]
    sizes: tuple[int, ...] = (32, 32)
    seen = [sizes]
    for _ in range(6):
        sizes = faster_sizes(sizes, seconds_of(sizes, per_sample, 20.0))
        seen.append(sizes)
    best = min(max(seconds_of((n, 64 - n), per_sample, 20.0)) for n in range(1, 64))
    assert max(seconds_of(sizes, per_sample, 20.0)) <= 1.05 * best
    assert seen[-1] == seen[-2]


def test_less_than_the_dead_band_moves_nothing() -> None:
    even = (100, 100)
    assert faster_sizes(even, [1.0, 1.08]) == even
    assert faster_sizes(even, [1.0, 1.15]) == (107, 93)
    assert faster_sizes((3, 3), [1.0, 1.15]) == (3, 3)  # no whole sample is worth it
    assert faster_sizes((30, 30), [1.0, 1000.0], least=4) == (56, 4)


def test_weights_of_losses_average_to_one() -> None:
    shares = [BatchShare(rank, (5, 2, 1), (5.0, 2.0, 1.0)) for rank in range(3)]
    assert [(one.start, one.stop) for one in shares] == [(0, 5), (5, 7), (7, 8)]
    assert sum(one.weight for one in shares) == pytest.approx(3.0)
    last = [one.of(3) for one in shares]
    assert [one.size for one in last] == [1, 1, 1]
