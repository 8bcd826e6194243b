"""Tensor fusion: buckets within the cap, in the order of the layers, of one dtype each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dearmpi.plan.data.layout import ParamSpec, build_layout, fuse_by_cap
from dearmpi.plan.model.cost import LinkModel
from dearmpi.plan.rivals.merging import ReadyGradient, fuse_by_cycle, fuse_until

KINDS = st.sampled_from([("float32", 4, "cpu"), ("bfloat16", 2, "cpu"), ("float32", 4, "cuda:0")])


@st.composite
def models(draw: st.DrawFn) -> list[ParamSpec]:
    """Up to a dozen parameters of mixed sizes, dtypes and devices, in feed-forward order."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 40), KINDS), min_size=1, max_size=12))
    return [
        ParamSpec(f"p{place}", (numel,), itemsize=itemsize, dtype=dtype, device=device)
        for place, (numel, (dtype, itemsize, device)) in enumerate(sizes)
    ]


def floats(*numels: int) -> list[ParamSpec]:
    return [ParamSpec(f"p{place}", (numel,)) for place, numel in enumerate(numels)]


def numels(buckets: tuple[tuple[ParamSpec, ...], ...]) -> list[list[int]]:
    return [[spec.numel for spec in bucket] for bucket in buckets]


def places(bucket: tuple[ParamSpec, ...]) -> list[int]:
    return [int(spec.name[1:]) for spec in bucket]


@given(models(), st.integers(1, 200))
def test_every_parameter_stands_in_one_bucket(model: list[ParamSpec], cap_bytes: int) -> None:
    buckets = fuse_by_cap(model, cap_bytes)
    assert sorted(spec.name for bucket in buckets for spec in bucket) == sorted(
        spec.name for spec in model
    )


@given(models(), st.integers(1, 200))
def test_only_a_single_parameter_exceeds_the_cap_beside_less_than_a_quarter_of_it(
    model: list[ParamSpec], cap_bytes: int
) -> None:
    for bucket in fuse_by_cap(model, cap_bytes):
        whole, rest = (sum(spec.nbytes for spec in part) for part in (bucket, bucket[1:]))
        assert whole <= cap_bytes or rest < cap_bytes / 4


@given(models(), st.integers(1, 200))
def test_order_is_kept_within_and_between_buckets(model: list[ParamSpec], cap_bytes: int) -> None:
    buckets = fuse_by_cap(model, cap_bytes)
    assert all(places(bucket) == sorted(places(bucket)) for bucket in buckets)
    firsts = [places(bucket)[0] for bucket in buckets]
    assert firsts == sorted(firsts)
    for kind in {spec.storage_kind for spec in model}:
        of_kind = [bucket for bucket in buckets if bucket[0].storage_kind == kind]
        joined = [place for bucket in of_kind for place in places(bucket)]
        assert joined == sorted(joined)


@given(models(), st.integers(1, 200))
def test_dtypes_and_devices_stay_apart(model: list[ParamSpec], cap_bytes: int) -> None:
    buckets = fuse_by_cap(model, cap_bytes)
    assert all(len({spec.storage_kind for spec in bucket}) == 1 for bucket in buckets)
    build_layout(buckets, world_size=3)  # accepts what fusion makes


@given(models(), st.integers(1, 200))
def test_a_bucket_is_closed_only_a_quarter_full_and_when_the_next_parameter_does_not_fit(
    model: list[ParamSpec], cap_bytes: int
) -> None:
    buckets = fuse_by_cap(model, cap_bytes)
    for kind in {spec.storage_kind for spec in model}:
        of_kind = [bucket for bucket in buckets if bucket[0].storage_kind == kind]
        for earlier, later in zip(of_kind, of_kind[1:], strict=False):
            if earlier is next((bucket for bucket in buckets if bucket[0].trained), None):
                continue  # what the first layers have to themselves
            filled = sum(spec.nbytes for spec in later)
            assert earlier[-1].nbytes + filled > cap_bytes and filled >= cap_bytes / 4


def test_what_does_not_fill_a_bucket_is_left_to_the_first_layers() -> None:
    assert numels(fuse_by_cap(floats(10, 10, 10, 10, 10), cap_bytes=80)) == [
        [10],
        [10, 10],
        [10, 10],
    ]


def test_the_first_layers_have_a_bucket_to_themselves() -> None:
    """No computation hides their reduce-scatter and all-gather."""
    assert numels(fuse_by_cap(floats(1, 1, 4, 4, 16), cap_bytes=64)) == [[1], [1, 4, 4], [16]]
    assert numels(fuse_by_cap(floats(1, 1, 4, 4, 10), cap_bytes=128)) == [[1, 1], [4, 4, 10]]
    # A class token of next to nothing is not worth a bucket.
    assert numels(fuse_by_cap(floats(1, 100, 700), cap_bytes=4096)) == [[1, 100], [700]]


def test_the_first_bucket_is_parted_only_if_a_quarter_of_the_cap_is_left() -> None:
    assert numels(fuse_by_cap(floats(1, 4), cap_bytes=64)) == [[1], [4]]
    assert numels(fuse_by_cap(floats(1, 4), cap_bytes=65)) == [[1, 4]]
    assert numels(fuse_by_cap(floats(30, 2), cap_bytes=128)) == [[30, 2]]


def test_frozen_layers_are_not_the_first() -> None:
    frozen = [replace(spec, name=f"frozen {spec.name}", trained=False) for spec in floats(2, 8)]
    buckets = fuse_by_cap([*frozen, *floats(1, 4)], cap_bytes=64)
    assert numels(buckets) == [[2, 8], [1], [4]]


def test_a_parameter_larger_than_the_cap_is_alone() -> None:
    assert numels(fuse_by_cap(floats(3, 100, 2, 2), cap_bytes=20)) == [[3], [100], [2, 2]]


def test_next_to_nothing_is_no_bucket_between_two_large_parameters() -> None:
    """ResNet-50 had ten buckets of less than 50 kB, each as much trouble as any other."""
    model = floats(6, 100, 1, 100, 5, 100, 4)
    buckets = fuse_by_cap(model, cap_bytes=80)
    assert numels(buckets) == [[6], [100, 1], [100], [5], [100, 4]]


def test_the_cap_itself_still_fits() -> None:
    assert numels(fuse_by_cap(floats(1, 5, 5), cap_bytes=40)) == [[1], [5, 5]]
    assert numels(fuse_by_cap(floats(1, 5, 5), cap_bytes=39)) == [[1], [5], [5]]


def test_the_smallest_and_the_largest_cap() -> None:
    for cap_bytes in (0, 1):
        assert numels(fuse_by_cap(floats(1, 2, 3), cap_bytes=cap_bytes)) == [[1], [2], [3]]
    assert numels(fuse_by_cap(floats(1, 2, 3), cap_bytes=2**40)) == [[1, 2, 3]]


def test_parameters_of_two_dtypes_in_turn_make_two_buckets() -> None:
    kinds = [("float32", 4), ("bfloat16", 2)] * 2
    specs = [
        ParamSpec(f"p{place}", (8,), itemsize=itemsize, dtype=dtype)
        for place, (dtype, itemsize) in enumerate(kinds)
    ]
    assert [places(bucket) for bucket in fuse_by_cap(specs, 10**6)] == [[0, 2], [1, 3]]


def test_no_parameters_make_no_buckets() -> None:
    assert fuse_by_cap([], cap_bytes=1) == ()


def test_the_work_grows_with_the_number_of_parameters_and_not_its_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cap that holds thousands of small parameters once took seconds on every rank."""
    looks = 0

    def count(spec: ParamSpec) -> int:
        nonlocal looks
        looks += 1
        return spec.numel * spec.itemsize

    monkeypatch.setattr(ParamSpec, "nbytes", property(count))
    specs = floats(*[1] * 1000)
    fuse_by_cap(specs, 10**6)
    assert looks <= 3 * len(specs)
    looks = 0
    arrivals = [ReadyGradient(spec, 0.0) for spec in specs]
    fuse_until(arrivals, first_bytes=10**6, cap_bytes=10**6)
    fuse_by_cycle(arrivals, LinkModel(1e-3, 1e-9), cap_bytes=10**6, cycle_s=1e-3)
    assert looks <= 4 * len(specs)
