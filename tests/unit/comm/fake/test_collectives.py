"""In-process ranks: results as of MPI, and misuse found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dearmpi.comm.api.collectives import Collectives, Request
from dearmpi.comm.messages.values import HostBuffer
from dearmpi.errors import CommError, ConfigError
from tests.codes import raises
from tests.fakes import FakeHub
from tests.unit.comm.fake.twins import channels, gather_all

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64]


def is_spoiled(buffer: Tensor) -> bool:
    return bool(buffer.isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_scatter_leaves_only_the_own_shard(dtype: torch.dtype) -> None:
    inputs = [torch.arange(6).add(rank).to(dtype) for rank in range(3)]
    buffers = [tensor.clone() for tensor in inputs]
    requests = [
        c.start_reduce_scatter(b, "ring")
        for c, b in zip(channels(FakeHub(3)), buffers, strict=True)
    ]
    assert all(request.test() for request in requests)
    total = inputs[0] + inputs[1] + inputs[2]
    for rank, buffer in enumerate(buffers):
        own = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(buffer[own], total[own])
        rest = torch.cat([buffer[: own.start], buffer[own.stop :]])
        assert is_spoiled(rest) if dtype.is_floating_point else bool((rest == -1).all())


def test_half_precision_on_the_wire_rounds_what_is_sent_and_takes_half_the_bytes() -> None:
    moved: list[int] = []

    def seconds(label: str, nbytes: int) -> float:
        moved.append(nbytes)
        return 0.0

    twins = channels(FakeHub(2, seconds=seconds))
    third = torch.tensor(1 / 3)
    buffers = [torch.full((4,), float(third)) for _ in range(4)]
    requests = [
        c.start_reduce_scatter(b, "ring", wire_dtype="bf16")
        for c, b in zip(twins, buffers[:2], strict=True)
    ]
    requests += [
        c.start_all_gather(b, wire_dtype="fp16") for c, b in zip(twins, buffers[2:], strict=True)
    ]
    assert all(request.test() for request in requests)
    assert moved == [8, 8]
    assert torch.equal(buffers[0][:2], (2 * third.bfloat16().float()).expand(2))
    assert all(torch.equal(b, third.half().float().expand(4)) for b in buffers[2:])


def test_one_rank_sends_nothing_so_nothing_is_rounded() -> None:
    (twin,) = channels(FakeHub(1))
    buffer = torch.full((3,), 1 / 3)
    assert twin.start_all_gather(buffer, wire_dtype="bf16").test()
    assert torch.equal(buffer, torch.full((3,), 1 / 3))


def test_all_gather_spoils_what_is_in_flight_and_then_fills_it() -> None:
    hub = FakeHub(2)
    buffers = [torch.full((4,), float(rank)) for rank in range(2)]
    twins = channels(hub)
    first = twins[0].start_all_gather(buffers[0])
    assert not first.test()
    assert buffers[0][:2].tolist() == [0.0, 0.0] and is_spoiled(buffers[0][2:])
    second = twins[1].start_all_gather(buffers[1])
    assert first.test() and second.test() and first.test()
    assert [buffer.tolist() for buffer in buffers] == [[0.0, 0.0, 1.0, 1.0]] * 2


@pytest.mark.parametrize(("op", "expected"), [("sum", 3.0), ("max", 2.0), ("min", 0.0)])
@pytest.mark.parametrize("make", [torch.tensor, lambda values: HostBuffer(np.array(values))])
def test_all_reduce(op: Any, expected: float, make: Callable[[list[float]], Any]) -> None:
    buffers = [make([float(rank)]) for rank in range(3)]
    requests = [
        c.start_all_reduce(b, op) for c, b in zip(channels(FakeHub(3)), buffers, strict=True)
    ]
    assert all(request.test() for request in requests)
    values = [getattr(buffer, "array", buffer).tolist() for buffer in buffers]
    assert values == [[expected]] * 3


def test_broadcast() -> None:
    buffers = [torch.full((2,), float(rank)) for rank in range(3)]
    requests = [c.start_broadcast(b, 1) for c, b in zip(channels(FakeHub(3)), buffers, strict=True)]
    assert all(request.test() for request in requests)
    assert [buffer.tolist() for buffer in buffers] == [[1.0, 1.0]] * 3


def test_an_operation_waits_for_the_last_rank() -> None:
    twins = channels(FakeHub(2))
    early = twins[0].start_all_reduce(torch.ones(1), "sum")
    assert not early.test() and not early.test()
    twins[1].start_all_reduce(torch.ones(1), "sum")
    assert early.test()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda c: c.start_all_gather(torch.ones(4)), lambda c: c.start_all_gather(torch.ones(6))),
        (
            lambda c: c.start_all_gather(torch.ones(4)),
            lambda c: c.start_all_gather(torch.ones(4, dtype=torch.float64)),
        ),
        (
            lambda c: c.start_all_gather(torch.ones(4)),
            lambda c: c.start_reduce_scatter(torch.ones(4), "ring"),
        ),
        (
            lambda c: c.start_reduce_scatter(torch.ones(4), "ring"),
            lambda c: c.start_reduce_scatter(torch.ones(4), "native"),
        ),
        (
            lambda c: c.start_all_gather(torch.ones(4)),
            lambda c: c.start_all_gather(torch.ones(4), wire_dtype="bf16"),
        ),
        (
            lambda c: c.start_broadcast(torch.ones(4), 0),
            lambda c: c.start_broadcast(torch.ones(4), 1),
        ),
    ],
)
def test_ranks_that_post_different_operations_all_fail(
    one: Callable[[Collectives], Request], other: Callable[[Collectives], Request]
) -> None:
    twins = channels(FakeHub(2))
    requests = [one(twins[0]), other(twins[1])]
    for rank, request in enumerate(requests):
        with pytest.raises(CommError, match=f"rank {rank}: .*rank 0 posted .*rank 1 posted"):
            request.test()


def test_a_wrong_order_fails_where_buckets_have_names() -> None:
    hub = FakeHub(2, name=lambda buffer: "0" if buffer.numel() == 2 else "1")
    twins = channels(hub)
    first = twins[0].start_all_gather(torch.ones(2))
    twins[1].start_all_gather(torch.ones(4))
    with pytest.raises(CommError, match="rank 0 posted AG0.* of 2 .*rank 1 posted AG1.* of 4 "):
        first.test()


@pytest.mark.parametrize("kind", ["RS", "AG"])
def test_lengths_that_do_not_divide_are_refused(kind: str) -> None:
    twin = channels(FakeHub(2))[0]
    with raises(ConfigError, "buffer-not-divisible", f"{kind} of 3 elements over 2 ranks"):
        if kind == "RS":
            twin.start_reduce_scatter(torch.ones(3), "ring")
        else:
            twin.start_all_gather(torch.ones(3))


def test_a_buffer_written_to_in_flight_is_found() -> None:
    buffers, requests = gather_all(FakeHub(2))
    buffers[1][0] = 5.0
    assert requests[0].test()
    with pytest.raises(CommError, match="rank 1: the buffer of AG was written to"):
        requests[1].test()


def test_writing_in_flight_is_not_looked_for_unless_asked() -> None:
    buffers, requests = gather_all(FakeHub(2, check_buffers=False))
    buffers[1][0] = 5.0
    assert all(request.test() for request in requests)
    assert buffers[0].tolist() == buffers[1].tolist() == [0.0, 0.0, 1.0, 1.0]
