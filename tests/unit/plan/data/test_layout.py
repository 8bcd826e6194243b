"""Buckets: every element has one place, every rank an equal shard, padding only where needed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import Bucket, BucketLayout, ParamSpec, build_layout
from tests.codes import raises

SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple)
GROUPS = st.lists(st.lists(SHAPES, min_size=1, max_size=5), min_size=1, max_size=5)


def spec(name: str, *shape: int, dtype: str = "float32", device: str = "cpu") -> ParamSpec:
    return ParamSpec(name, shape, dtype=dtype, device=device)


def named(groups: list[list[tuple[int, ...]]]) -> list[list[ParamSpec]]:
    return [
        [ParamSpec(f"p{i}.{j}", shape) for j, shape in enumerate(group)]
        for i, group in enumerate(groups)
    ]


@given(GROUPS, st.integers(1, 7))
def test_every_element_has_exactly_one_place(
    groups: list[list[tuple[int, ...]]], world_size: int
) -> None:
    layout = build_layout(named(groups), world_size)
    owners = Counter(
        (bucket.index, element)
        for bucket in layout
        for placed in bucket.placements
        for element in range(placed.start, placed.stop)
    )
    assert set(owners.values()) == {1}
    for bucket, group in zip(layout, named(groups), strict=True):
        assert bucket.numel == sum(spec.numel for spec in group)
        assert {e for index, e in owners if index == bucket.index} == set(range(bucket.numel))
        whole = [spec.name for spec in group if spec.nbytes % 16 == 0]
        assert bucket.names == (*whole, *(s.name for s in group if s.name not in whole))
        for placed in bucket.placements[: len(whole) + 1]:
            assert placed.start * 4 % 16 == 0  # bytes, as code for devices may take for granted


@given(GROUPS, st.integers(1, 7))
def test_shards_are_equal_and_cover_the_buffer_in_rank_order(
    groups: list[list[tuple[int, ...]]], world_size: int
) -> None:
    for bucket in build_layout(named(groups), world_size):
        ranges = [bucket.shard_range(rank) for rank in range(world_size)]
        elements = [element for start, stop in ranges for element in range(start, stop)]
        assert elements == list(range(bucket.padded_numel))
        assert {stop - start for start, stop in ranges} == {bucket.largest_shard}
        assert 0 <= bucket.padded_numel - bucket.numel < world_size


@given(st.integers(1, 50), st.integers(1, 7))
def test_there_is_no_padding_where_the_world_size_divides(shard: int, world_size: int) -> None:
    (bucket,) = build_layout([[spec("p", shard * world_size)]], world_size)
    assert bucket.padded_numel == bucket.numel == shard * world_size


def test_padding_fills_up_to_the_next_multiple() -> None:
    (bucket,) = build_layout([[spec("w", 2, 5), spec("b")]], world_size=4)
    assert (bucket.numel, bucket.padded_numel, bucket.largest_shard) == (11, 12, 3)
    assert bucket.nbytes == 48
    assert [(placed.start, placed.stop) for placed in bucket.placements] == [(0, 10), (10, 11)]
    assert bucket.shard_range(3) == (9, 12)


def test_a_bucket_smaller_than_the_world_is_mostly_padding() -> None:
    (bucket,) = build_layout([[spec("scale")]], world_size=5)
    assert (bucket.numel, bucket.padded_numel) == (1, 5)


def test_sizes_count_the_bytes_of_the_dtype() -> None:
    half = ParamSpec("h", (3,), itemsize=2, dtype="bfloat16")
    (bucket,) = build_layout([[half]], world_size=2)
    assert (half.nbytes, bucket.itemsize, bucket.nbytes) == (6, 2, 8)


def test_parameters_are_found_by_name() -> None:
    layout = build_layout([[spec("a", 1), spec("b", 2)], [spec("c", 3)]], world_size=2)
    assert len(layout) == 2
    assert {name: bucket.index for name, bucket in layout.bucket_of().items()} == {
        "a": 0,
        "b": 0,
        "c": 1,
    }


def test_description_names_the_ends_and_the_padding() -> None:
    layout = build_layout([[spec("in.weight", 2), spec("in.bias", 1)], [spec("out", 4)]], 2)
    first, second = layout.describe().splitlines()
    assert first.startswith("bucket 0: 2 tensors") and first.endswith(": in.weight .. in.bias")
    assert "shard 2, padding 1" in first
    assert second.startswith("bucket 1: 1 tensors") and second.endswith("padding 0: out")


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ([[spec("a", 1)], []], ("1",)),
        ([[spec("a", 3, 0)]], ("(3, 0)",)),
        ([[spec("a", 1), spec("b", 1, dtype="float64")]], ("float32", "float64")),
        ([[spec("a", 1), spec("b", 1, device="cuda:0")]], ("cuda:0",)),
        ([[spec("a", 1)], [spec("a", 1)]], ()),
        ([[spec("a", 1), spec("a", 1)]], ()),
    ],
)
def test_bad_groups_are_refused(groups: list[list[ParamSpec]], told: tuple[str, ...]) -> None:
    with raises(ConfigError, "plan-inconsistent", *told):
        build_layout(groups, world_size=2)


def test_a_layout_holds_buckets_of_its_own_world_in_order() -> None:
    (bucket,) = build_layout([[spec("a", 4)]], world_size=2)
    with pytest.raises(AssertionError):
        BucketLayout((bucket,), world_size=4)
    with pytest.raises(AssertionError):
        BucketLayout((Bucket(1, bucket.placements, bucket.cuts),), world_size=2)
