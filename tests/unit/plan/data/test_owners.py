"""Owners: each parameter has one, work and bytes are even, and every rank finds the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dearmpi.plan.data.layout import BucketLayout, ParamSpec, build_layout
from dearmpi.plan.data.owners import assign_owners, known_cost, owner_bound


def layout_of(lengths: list[list[int]], size: int) -> BucketLayout:
    groups = [
        [ParamSpec(f"{bucket}.{place}", (length, 2)) for place, length in enumerate(members)]
        for bucket, members in enumerate(lengths)
    ]
    return build_layout(groups, size)


def loads_of(layout: BucketLayout, costs: dict[str, float]) -> list[float]:
    return [
        sum(
            costs.get(bucket.names[slot], 0.0)
            for bucket in layout
            for slot in bucket.owned_slots(rank)
        )
        for rank in range(layout.world_size)
    ]


LENGTHS = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=5)


@given(LENGTHS, st.integers(1, 8))
def test_what_is_updated_as_a_whole_has_one_owner(lengths: list[list[int]], size: int) -> None:
    even = layout_of(lengths, size)
    names = [name for bucket in even for name in bucket.names]
    costs = {name: float(len(name) + index) for index, name in enumerate(names) if index % 3}
    order = list(reversed(range(len(even))))
    layout = assign_owners(even, costs, order)
    assert layout == assign_owners(even, costs, order)
    for bucket, before in zip(layout, even, strict=True):
        assert sorted(bucket.names) == sorted(before.names)
        assert bucket.padded_numel == bucket.numel == before.numel
        ends = [0, *(placed.stop for placed in bucket.placements)]
        assert ends[:-1] == [placed.start for placed in bucket.placements]
        for placed in bucket.placements:
            owners = bucket.cuts.owners(placed.start, placed.stop)
            ranges = [bucket.shard_range(rank) for rank in owners]
            if placed.spec.name in costs:
                assert any(a <= placed.start and placed.stop <= b for a, b in ranges)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=24), st.integers(1, 6))
def test_no_rank_works_a_third_longer_than_it_must(lengths: list[int], size: int) -> None:
    """Within one bucket; the longest update, and the mean, are below what is possible."""
    costs = {f"0.{place}": float(length) for place, length in enumerate(lengths)}
    loads = loads_of(assign_owners(layout_of([lengths], size), costs, [0]), costs)
    in_order = sorted(lengths, reverse=True)
    least = max(sum(lengths) / size, in_order[0])
    if len(lengths) > size:
        least = max(least, in_order[size - 1] + in_order[size])
    assert max(loads) <= 4 / 3 * least + 1e-9


def test_loads_carry_on_over_buckets_in_launch_order() -> None:
    """By hand: bucket 1 is reduced first. Filler goes where the fewest bytes are."""
    layout = layout_of([[3, 4], [5, 2, 1]], 2)
    costs = {"1.0": 5.0, "1.1": 2.0, "0.0": 3.0, "0.1": 4.0}
    owned = assign_owners(layout, costs, [1, 0])
    assert [b.names for b in owned] == [("0.0", "0.1"), ("1.0", "1.1", "1.2")]
    assert loads_of(owned, costs) == [8.0, 6.0]
    assert [b.cuts.offsets for b in owned] == [(0, 6, 14), (0, 10, 16)]
    assert "elements by rank: 6, 8" in owned.describe()


def test_frozen_parameters_do_not_count_as_bytes() -> None:
    groups = [
        [ParamSpec("a", (96,), trained=False)],
        [ParamSpec("b", (64,)), ParamSpec("c", (64,))],
    ]
    owned = assign_owners(build_layout(groups, 2), {}, [0, 1])
    assert [b.cuts.offsets for b in owned] == [(0, 48, 96), (0, 64, 128)]


def bytes_by_rank(layout: BucketLayout) -> list[int]:
    return [
        sum(bucket.cuts.size_of(rank) * bucket.itemsize for bucket in layout)
        for rank in range(layout.world_size)
    ]


@given(LENGTHS, st.integers(2, 8))
def test_filler_levels_bytes(lengths: list[list[int]], size: int) -> None:
    """A bucket that nothing else is in makes up for all others, up to the alignment of shards."""
    num_elements = sum(map(sum, lengths))
    even = layout_of([*lengths, [num_elements * size]], size)
    names = [name for bucket in even for name in bucket.names]
    costs = dict.fromkeys(names[:-1:2], 1.0)
    found = bytes_by_rank(assign_owners(even, costs, range(len(even))))
    assert max(found) - min(found) <= 2 * 16 * 4


def test_a_large_filler_is_cut_between_what_is_whole() -> None:
    """By hand: the embedding levels two ranks; the vector fills the third one."""
    layout = layout_of([[320, 16, 64, 48, 32]], 3)
    costs = {"0.1": 3.0, "0.2": 2.0, "0.3": 1.0}
    (bucket,) = assign_owners(layout, costs, [0])
    assert bucket.names == ("0.1", "0.0", "0.2", "0.3", "0.4")
    assert bucket.cuts.offsets == (0, 400, 800, 960)


def test_costs_by_formula() -> None:
    """Five iterations of Newton and Schulz on a matrix whose longer side comes last."""
    assert known_cost("Muon", (8, 2)) == known_cost("Muon", (2, 8)) == 5 * (4 * 4 * 8 + 2 * 8)
    assert known_cost("Adafactor", (3, 4)) == 12.0
    assert known_cost("SOAP", (2, 2)) == (8 + 8) * 2.5 + 4 * 4 * 4
    assert known_cost("Muon", (4, 3, 5)) == known_cost("Muon", (4, 15))
    assert known_cost("Mine", (2, 2)) is None


def test_the_bound_of_one_large_tensor() -> None:
    assert owner_bound({"a": 6.0, "b": 2.0}, 4) == 3.0
    assert owner_bound({"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0, "e": 1.0}, 4) == 1.0
    assert owner_bound({}, 4) == 1.0
