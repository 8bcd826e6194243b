"""Flat buffers: every parameter has its place, and every element one owner."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dearmpi.engine.bucket.bucket import BucketRuntime, BucketState
from dearmpi.engine.bucket.buffers import Arena, FlatBuffer, flattened
from dearmpi.plan.data.layout import Bucket, ParamSpec, build_layout

SHAPES = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=5)


def bucket_of(tensors: list[Tensor], world_size: int) -> Bucket:
    specs = [ParamSpec(f"p{n}", tuple(tensor.shape)) for n, tensor in enumerate(tensors)]
    return build_layout([specs], world_size).buckets[0]


def buffer_of(bucket: Bucket, tensors: list[Tensor], *, rank: int = 0) -> FlatBuffer:
    return FlatBuffer(bucket, Arena([bucket]).take(bucket, tensors[0]), tensors, rank=rank)


def runtime_of(param: nn.Parameter) -> BucketRuntime:
    bucket = bucket_of([param], 2)
    return BucketRuntime(
        bucket, [param], rank=0, gradients=Arena([bucket]), parameters=Arena([bucket])
    )


@given(SHAPES, st.integers(1, 6))
def test_every_element_is_in_one_view_and_in_one_shard(
    shapes: list[tuple[int, ...]], world_size: int
) -> None:
    tensors = [torch.zeros(shape) for shape in shapes]
    bucket = bucket_of(tensors, world_size)
    tensors = [tensors[int(name.removeprefix("p"))] for name in bucket.names]
    buffers = [buffer_of(bucket, tensors, rank=rank) for rank in range(world_size)]
    for number, view in enumerate(buffers[0].views):
        assert view.shape == tensors[number].shape
        view.add_(number + 1)
    expected = [number + 1.0 for number, t in enumerate(tensors) for _ in range(t.numel())]
    assert buffers[0].data[: bucket.numel].tolist() == expected
    for rank, buffer in enumerate(buffers):
        buffer.shard.add_(1)
        own = torch.zeros(bucket.padded_numel)
        own[bucket.shard_range(rank)[0] : bucket.shard_range(rank)[1]] = 1
        own[bucket.numel :] = 0
        if rank:
            assert torch.equal(buffer.data, own)
    assert sum(buffer.shard.numel() for buffer in buffers) == bucket.numel


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 2, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
        torch.randn(4, 1, 1, 1).to(memory_format=torch.channels_last),
        torch.randn(3, 4),
        torch.tensor(2.0),
    ],
    ids=lambda tensor: str(tuple(tensor.shape)),
)
def test_memory_formats_are_kept(tensor: Tensor) -> None:
    bucket = bucket_of([tensor], 2)
    buffer = buffer_of(bucket, [tensor])
    buffer.views[0].copy_(tensor)
    assert buffer.views[0].stride() == tensor.stride()
    assert torch.equal(buffer.views[0], tensor)
    assert torch.equal(buffer.data[: tensor.numel()], flattened(tensor))


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.randn(4, 3).T, (1, 3)),
        (torch.randn(2, 4, 3).permute(1, 2, 0), (3, 1, 12)),
        (torch.randn(4, 3).unsqueeze(1).transpose(0, 2), (1, 1, 3)),
    ],
)
def test_a_parameter_keeps_its_order_in_memory(tensor: Tensor, stride: tuple[int, ...]) -> None:
    """Fused optimizers go through that of the gradient and of the parameter alike."""
    param = nn.Parameter(tensor)
    values = param.detach().clone()
    bucket = runtime_of(param)
    moved = tuple(s for s, size in zip(param.stride(), param.shape, strict=True) if size > 1)
    assert moved == tuple(s for s, size in zip(stride, param.shape, strict=True) if size > 1)
    assert bucket.gradients.views[0].stride() == param.stride() and torch.equal(param, values)


def test_a_parameter_with_gaps_becomes_contiguous_and_keeps_its_values() -> None:
    param = nn.Parameter(torch.randn(4, 3)[:, ::2])
    values = param.detach().clone()
    bucket = runtime_of(param)
    assert param.is_contiguous() and torch.equal(param, values)
    assert bucket.parameters is not None
    assert param.data_ptr() == bucket.parameters.data.data_ptr()


def test_buckets_lie_side_by_side_but_are_copied_and_saved_one_by_one() -> None:
    groups = [[ParamSpec("a", (5,), 4, "float32")], [ParamSpec("b", (3,), 2, "bfloat16")]]
    layout = build_layout(groups, 2)
    arena = Arena(layout)
    first = arena.take(layout.buckets[0], torch.zeros(5))
    second = arena.take(layout.buckets[1], torch.zeros(3, dtype=torch.bfloat16))
    first.fill_(1.0)
    assert second.tolist() == [0.0] * 4 and second.dtype is torch.bfloat16
    assert second.data_ptr() - first.data_ptr() == 64
    assert first.untyped_storage().nbytes() == layout.buckets[0].nbytes


def test_a_view_is_a_storage_of_its_own_on_the_memory_of_its_bucket() -> None:
    tensors = [torch.zeros(3), torch.zeros(2, 5)]
    bucket = bucket_of(tensors, 2)
    buffer = buffer_of(bucket, tensors)
    for placed, view in zip(bucket.placements, buffer.views, strict=True):
        assert view.untyped_storage().nbytes() == view.nbytes
        assert view.data_ptr() == buffer.data[placed.start :].data_ptr()


GATHER_PARAMETERS = "READY REDUCING REDUCED UPDATING UPDATED GATHERING GATHERED IDLE"
GATHER_GRADIENTS = "READY REDUCING REDUCED GATHERING GATHERED UPDATING UPDATED IDLE"
FURTHER_BACKPROP = "READY REDUCING REDUCED IDLE READY REDUCING REDUCED UPDATING UPDATED"


def make_bucket() -> BucketRuntime:
    param = nn.Parameter(torch.zeros(4))
    return runtime_of(param)


@pytest.mark.parametrize("path", [GATHER_PARAMETERS, GATHER_GRADIENTS, FURTHER_BACKPROP])
def test_a_bucket_s_way_through_an_iteration(path: str) -> None:
    bucket = make_bucket()
    for name in path.split():
        bucket.move_to(BucketState[name])
        assert bucket.state is BucketState[name]


@pytest.mark.parametrize(
    "path",
    [
        "REDUCING",  # before its gradients are there
        "READY READY",
        "READY REDUCING UPDATING",  # before they are averaged
        "READY REDUCING REDUCED GATHERED",
        "READY REDUCING REDUCED UPDATING GATHERING",  # while the update writes
        "READY REDUCING IDLE",  # while MPI reads
    ],
)
def test_a_bucket_refuses_to_skip_a_state(path: str) -> None:
    *way, last = path.split()
    bucket = make_bucket()
    for name in way:
        bucket.move_to(BucketState[name])
    with pytest.raises(AssertionError):
        bucket.move_to(BucketState[last])
