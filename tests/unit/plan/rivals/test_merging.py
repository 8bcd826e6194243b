"""Merging: when other systems close a bucket, by small cases worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.data.workload import Workload, float_layer
from dearmpi.plan.model.cost import LinkModel
from dearmpi.plan.model.profile import LayerTimes, ModelProfile
from dearmpi.plan.rivals.merging import (
    FusedGradients,
    ReadyGradient,
    fuse_by_cycle,
    fuse_until,
    merge_where_start_up_is_saved,
    ready_gradients,
)

LINK = LinkModel(1.0, 0.1)  # a second to start up, and one for 10 bytes


def arrivals(*pairs: tuple[float, int]) -> list[ReadyGradient]:
    """Gradients of one byte per element, by when they are ready and how long they are."""
    return [
        ReadyGradient(ParamSpec(f"p{place}", (numel,), itemsize=1), ready_s)
        for place, (ready_s, numel) in enumerate(pairs)
    ]


def names(merged: Sequence[FusedGradients]) -> list[str]:
    return [" ".join(spec.name for spec in one.specs) for one in merged]


def end_s(
    merged: Sequence[FusedGradients], gradients: Sequence[ReadyGradient], link: LinkModel
) -> float:
    """When the last of the all-reduces is over."""
    ready_s = {arrival.spec.name: arrival.ready_s for arrival in gradients}
    now_s = 0.0
    for one in merged:
        now_s = max(now_s, *(ready_s[spec.name] for spec in one.specs))
        now_s += link.alone_s(sum(spec.nbytes for spec in one.specs))
    return now_s


def test_a_tied_parameter_arrives_with_the_first_layer_that_uses_it() -> None:
    layers = (
        float_layer("embed", {"weight": (2,)}, 1),
        float_layer("body", {"weight": (2,), "bias": (1,)}, 1),
        float_layer("head", {}, 1, uses=("embed.weight",)),
    )
    workload = Workload("tied", "", layers, batch_size=1, unit="img")
    profile = ModelProfile(workload, tuple(LayerTimes(1, seconds) for seconds in (3, 2, 1)))
    found = [(arrival.spec.name, arrival.ready_s) for arrival in ready_gradients(profile)]
    assert found == [("body.bias", 3), ("body.weight", 3), ("embed.weight", 6)]


def test_a_bucket_of_ddp_closes_once_it_is_full() -> None:
    # What torch 2.13 says: _compute_bucket_assignment_by_size of float tensors of 3, 3, 10, 1, 1,
    # 20 and 1 elements with limits of 20 and 40 bytes is [[0, 1], [2], [3, 4, 5], [6]].
    sizes = (12, 12, 40, 4, 4, 80, 4)
    merged = fuse_until(arrivals(*((0, size) for size in sizes)), first_bytes=20, cap_bytes=40)
    assert names(merged) == ["p0 p1", "p2", "p3 p4 p5", "p6"]


@given(
    st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=20),
    st.integers(1, 99),
    st.integers(1, 99),
)
def test_ddp_fills_a_bucket_for_each_dtype_as_torch_does(
    sizes: list[tuple[int, bool]], first_bytes: int, cap_bytes: int
) -> None:
    tensors = [
        torch.empty(numel, dtype=torch.bfloat16 if is_half else torch.float32)
        for numel, is_half in sizes
    ]
    gradients = [
        ReadyGradient(
            ParamSpec(f"{place}", (tensor.numel(),), tensor.itemsize, dtype=str(tensor.dtype)[6:]),
            float(place),
        )
        for place, tensor in enumerate(tensors)
    ]
    merged = fuse_until(gradients, first_bytes=first_bytes, cap_bytes=cap_bytes)
    limits = [first_bytes, cap_bytes]
    assign = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    indices, _ = assign(tensors, limits, [], list(range(len(tensors))))
    assert sorted(names(merged)) == sorted(" ".join(map(str, group)) for group in indices)
    assert [one.start_s for one in merged[:-2]] == sorted(one.start_s for one in merged[:-2])


def test_a_bucket_has_one_dtype() -> None:
    half = ReadyGradient(ParamSpec("half", (1,), itemsize=2, dtype="bfloat16"), 0.0)
    gradients = [*arrivals((0, 1), (0, 1)), half, *arrivals((0, 1))]
    assert names(merge_where_start_up_is_saved(gradients, LINK)) == ["p0 p1", "half", "p0"]
    cycled = fuse_by_cycle(gradients, LINK, cap_bytes=99, cycle_s=1)
    assert names(cycled) == ["p0 p1 p0", "half"]


@pytest.mark.parametrize(
    ("second_s", "expected"),
    [(0.9, ["p0 p1", "p2"]), (1.0, ["p0", "p1", "p2"])],  # a wait of 1 s saves nothing
)
def test_mg_wfbp_waits_for_less_than_the_start_up(second_s: float, expected: list[str]) -> None:
    gradients = arrivals((0, 10), (second_s, 10), (9, 10))
    assert names(merge_where_start_up_is_saved(gradients, LINK)) == expected


def test_mg_wfbp_merges_what_arrives_while_the_network_is_busy() -> None:
    gradients = arrivals((0, 40), (2, 1), (4, 1), (5.9, 1), (7, 1))
    # p0 is on its way until 5, the next bucket could start then and waits for p3, not for p4.
    assert names(merge_where_start_up_is_saved(gradients, LINK)) == ["p0", "p1 p2 p3", "p4"]


@given(
    st.lists(st.tuples(st.floats(0, 3), st.sampled_from([1, 2, 10, 50])), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.5, 1.0, 5.0]),
    st.sampled_from([0.0, 0.02, 0.1, 1.0]),
)
def test_mg_wfbp_is_never_later_than_one_bucket_or_one_for_each(
    steps: list[tuple[float, int]], alpha_s: float, beta_s: float
) -> None:
    now_s, pairs = 0.0, []
    for wait_s, numel in steps:
        now_s += wait_s
        pairs.append((now_s, numel))
    gradients, link = arrivals(*pairs), LinkModel(alpha_s, beta_s)
    merged = merge_where_start_up_is_saved(gradients, link)
    each = [FusedGradients((arrival.spec,), 0.0) for arrival in gradients]
    one = [FusedGradients(tuple(arrival.spec for arrival in gradients), 0.0)]
    least_s = min(end_s(each, gradients, link), end_s(one, gradients, link))
    assert end_s(merged, gradients, link) <= least_s + 1e-9


def test_horovod_fuses_what_has_come_when_its_thread_wakes_up() -> None:
    gradients = arrivals((0.2, 10), (0.9, 10), (1.1, 10), (5.2, 10), (7.4, 10))
    merged = fuse_by_cycle(gradients, LINK, cap_bytes=20, cycle_s=0.5)
    # At 0.5 p0 alone, until 2.5; then p1 and p2 until 5.5, p3 until 7.5, p4.
    assert names(merged) == ["p0", "p1 p2", "p3", "p4"]
    assert [one.start_s for one in merged] == [0.5, 2.5, 5.5, 7.5]


def test_horovod_splits_by_its_cap_within_a_cycle() -> None:
    gradients = arrivals((0, 10), (0, 10), (0, 10), (0, 50))
    merged = fuse_by_cycle(gradients, LINK, cap_bytes=20, cycle_s=0.5)
    assert names(merged) == ["p0 p1", "p2", "p3"]
    assert {one.start_s for one in merged} == {0.0}
