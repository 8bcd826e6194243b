"""Cuts: every element has one owner, evenly or not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dearmpi.cuts import Cuts, balanced_cuts, even_cuts, weighted_cuts

UNEVEN = Cuts((0, 0, 5, 5, 12, 12))  # ranks 0, 2 and 4 own nothing


@given(st.integers(0, 1000), st.integers(1, 64))
def test_even_cuts_pad_by_less_than_an_element_a_rank(numel: int, num_ranks: int) -> None:
    cuts = even_cuts(numel, num_ranks)
    assert cuts.num_ranks == num_ranks == len(cuts.offsets) - 1
    assert 0 <= cuts.total - numel < num_ranks and cuts.total % num_ranks == 0
    assert {cuts.size_of(rank) for rank in range(num_ranks)} == {cuts.largest}


@pytest.mark.parametrize(
    "cuts", [even_cuts(11, 4), even_cuts(0, 3), even_cuts(7, 1), balanced_cuts(11, 4), UNEVEN]
)
def test_each_element_has_one_owner(cuts: Cuts) -> None:
    owned = [range(*cuts.range_of(rank)) for rank in range(cuts.num_ranks)]
    assert [index for one in owned for index in one] == list(range(cuts.total))
    assert [len(one) for one in owned] == [cuts.size_of(rank) for rank in range(cuts.num_ranks)]
    elements = list(range(cuts.total))
    assert [elements[cuts.slice_of(rank)] for rank in range(cuts.num_ranks)] == list(
        map(list, owned)
    )
    for start in range(cuts.total):
        for stop in range(start + 1, cuts.total + 1):
            owners = {rank for rank, one in enumerate(owned) if set(one) & set(range(start, stop))}
            assert owners <= set(cuts.owners(start, stop))
            assert {0, *owners} == {0, *(r for r in cuts.owners(start, stop) if cuts.size_of(r))}


def test_even_cuts_of_many_ranks_take_no_memory() -> None:
    cuts = even_cuts(1 << 40, 1 << 20)
    assert cuts.largest == 1 << 20 and cuts.range_of(5) == (5 << 20, 6 << 20)
    assert list(cuts.owners((7 << 20) - 1, (7 << 20) + 1)) == [6, 7]
    assert cuts == even_cuts((1 << 40) - 1, 1 << 20) and hash(cuts)


def test_the_largest_shard_may_be_any() -> None:
    assert UNEVEN.largest == 7 and even_cuts(11, 4).largest == 3


@given(st.integers(0, 1000), st.integers(1, 64))
def test_balanced_cuts_have_no_padding(numel: int, num_ranks: int) -> None:
    cuts = balanced_cuts(numel, num_ranks)
    sizes = [cuts.size_of(rank) for rank in range(num_ranks)]
    assert sum(sizes) == cuts.total == numel and max(sizes) - min(sizes) <= 1
    assert cuts.largest == max(sizes)


@given(
    st.integers(0, 5000),
    st.lists(st.floats(0, 1e6), min_size=1, max_size=9).filter(any),
)
def test_weighted_cuts_are_in_proportion(numel: int, weights: list[float]) -> None:
    cuts = weighted_cuts(numel, weights)
    assert cuts.total == numel and cuts.num_ranks == len(weights)
    for rank, weight in enumerate(weights):
        wanted = numel * (weight / sum(weights))
        assert cuts.size_of(rank) >= 0 and abs(cuts.size_of(rank) - wanted) <= 32
        assert weight or not cuts.size_of(rank)
    assert all(place % 16 == 0 or place == numel for place in cuts.offsets)
