"""In-process ranks: results as of MPI, misuse found, delays and faults as asked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dearmpi.comm.api import Buffer, Collectives, Request
from dearmpi.comm.fake import FakeClock, FakeCollectives, FakeHub, Fault
from dearmpi.comm.host import HostBuffer
from dearmpi.comm.ranks import run_ranks
from dearmpi.comm.world import World
from dearmpi.errors import CommError

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64]


def channels(hub: FakeHub) -> list[Collectives]:
    """A duplicated communicator of every rank, driven by the test itself."""
    pairs = [FakeCollectives(hub, rank).start_duplicate() for rank in range(hub.size)]
    assert all(request.test() for _, request in pairs)
    return [twin for twin, _ in pairs]


def gather_all(hub: FakeHub, numel: int = 4) -> tuple[list[Tensor], list[Request]]:
    buffers = [torch.full((numel,), float(rank)) for rank in range(hub.size)]
    return buffers, [
        c.start_all_gather(buffer) for c, buffer in zip(channels(hub), buffers, strict=True)
    ]


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
    with pytest.raises(CommError, match=f"{kind} of 3 elements over 2 ranks"):
        if kind == "RS":
            twin.start_reduce_scatter(torch.ones(3), "ring")
        else:
            twin.start_all_gather(torch.ones(3))


def test_operations_queue_up_on_one_wire() -> None:
    clock = FakeClock()
    hub = FakeHub(2, seconds=lambda label, nbytes: nbytes / 16, clock=clock.now)
    one, other = channels(hub), channels(hub)  # two channels, the same wire
    first = [c.start_all_gather(torch.ones(4)) for c in one]
    second = [c.start_all_gather(torch.ones(8)) for c in other]
    trail = []
    for _ in range(5):
        trail.append([all(r.test() for r in first), all(r.test() for r in second)])
        clock.advance(0.75)
    assert trail == [
        [False, False],
        [False, False],
        [True, False],  # 1.5 s: the first took 1 s
        [True, False],
        [True, True],  # 3 s: the second took 2 s more
    ]
    assert [(s.start_s, s.stop_s) for s in hub.spans] == [(0.0, 1.0), (1.0, 3.0)]


def test_the_wire_is_idle_until_all_ranks_are_there() -> None:
    clock = FakeClock()
    hub = FakeHub(2, seconds=lambda label, nbytes: 1.0, clock=clock.now)
    twins = channels(hub)
    early = twins[0].start_all_gather(torch.ones(4))
    clock.advance(5.0)
    assert not early.test()
    twins[1].start_all_gather(torch.ones(4))
    clock.advance(0.5)
    assert not early.test()
    clock.advance(0.5)
    assert early.test()


def test_the_exchanges_of_the_world_itself_take_no_time() -> None:
    clock = FakeClock()  # nobody advances it
    hub = FakeHub(2, seconds=lambda label, nbytes: 1.0, clock=clock.now)
    assert run_ranks(2, lambda world: world.all_reduce([1.0]), hub=hub) == [[2.0], [2.0]]


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


def test_fault_refuse_raises_where_the_operation_is_started() -> None:
    twins = channels(FakeHub(2, faults=[Fault(rank=1, action="refuse", nth=2)]))
    twins[1].start_all_gather(torch.ones(4))
    with pytest.raises(CommError, match="rank 1: AG was refused"):
        twins[1].start_all_gather(torch.ones(4))
    twins[1].start_all_gather(torch.ones(4))


def test_fault_break_raises_where_the_operation_is_tested() -> None:
    faults = [Fault(rank=0, action="break", label="RS")]
    twins = channels(FakeHub(2, faults=faults))
    gathers = [c.start_all_gather(torch.ones(4)) for c in twins]
    scatters = [c.start_reduce_scatter(torch.ones(4), "ring") for c in twins]
    assert all(request.test() for request in gathers)
    with pytest.raises(CommError, match="rank 0: RS broke"):
        scatters[0].test()
    assert scatters[1].test()


def test_fault_stall_keeps_the_operation_from_completing_anywhere() -> None:
    hub = FakeHub(2, faults=[Fault(rank=0, action="stall")])
    _, requests = gather_all(hub)
    assert not any(request.test() for request in requests)
    hub.fail("given up")
    for rank, request in enumerate(requests):
        with pytest.raises(CommError, match=f"rank {rank}: AG cannot complete: given up"):
            request.test()


def test_fault_delay_holds_up_one_rank() -> None:
    clock = FakeClock()
    hub = FakeHub(2, faults=[Fault(rank=1, action="delay", delay_s=2.0)], clock=clock.now)
    _, requests = gather_all(hub)
    assert [request.test() for request in requests] == [True, False]
    clock.advance(2.0)
    assert requests[1].test()


def overlap(hub: FakeHub) -> Callable[[World], None]:
    """What an iteration with two buckets posts, in the manner of DeAR."""

    def run(world: World) -> None:
        scatter, gather = world.open_channel("rs", window=2), world.open_channel("ag", window=1)
        buffers = [torch.ones(2 * world.size), torch.ones(4 * world.size)]
        for bucket in (1, 0):
            scatter.submit(f"RS{bucket}", _scatter(buffers[bucket]))
        scatter.close()
        hub.mark(world.rank)
        for bucket in (0, 1):
            gather.submit(f"AG{bucket}", _gather(buffers[bucket]))
        gather.close()
        world.barrier()

    return run


def _scatter(buffer: Buffer) -> Callable[[Collectives], Request]:
    return lambda c: c.start_reduce_scatter(buffer, "ring")


def _gather(buffer: Buffer) -> Callable[[Collectives], Request]:
    return lambda c: c.start_all_gather(buffer)


def test_what_was_posted_can_be_drawn() -> None:
    hub = FakeHub(3, name=lambda buffer: {6: "0", 12: "1"}.get(buffer.numel(), ""))
    run_ranks(3, overlap(hub), hub=hub)
    for rank in range(3):
        assert hub.picture(rank) == "RS1 RS0 | AG0 AG1"
        assert hub.picture(rank, 1) == "RS1 RS0 |"
        assert hub.picture(rank, 2) == "| AG0 AG1"
        assert hub.most_in_flight[rank, 2] == 1
    assert [span.label for span in hub.spans] == ["RS1", "RS0", "AG0", "AG1"]


def test_results_come_by_rank() -> None:
    assert run_ranks(5, lambda world: world.rank * 10) == [0, 10, 20, 30, 40]


def test_the_first_error_is_raised_with_the_tracebacks_of_all() -> None:
    def fail(world: World) -> None:
        if world.rank == 1:
            raise KeyError("no such layer")
        world.barrier()

    with pytest.raises(KeyError, match="no such layer") as failed:
        run_ranks(3, fail)
    notes = "\n".join(failed.value.__notes__)
    assert all(f"[rank {rank}] Traceback" in notes for rank in range(3))
    assert "rank 1 failed with KeyError('no such layer')" in notes


def test_ranks_that_hang_are_given_up_with_their_stacks() -> None:
    release = threading.Event()

    def hang(world: World) -> None:
        if world.is_root:
            release.wait(60)
            return
        try:
            world.barrier()
        finally:  # once the ranks are given up
            release.set()

    with pytest.raises(CommError, match=r"still ran after 0\.2 s") as failed:
        run_ranks(2, hang, timeout_s=0.2)
    assert "rank-0" in str(failed.value) and "release.wait(60)" in str(failed.value)
    assert "rank-1" in str(failed.value) and "world.barrier()" in str(failed.value)


def test_no_thread_is_left() -> None:
    run_ranks(3, lambda world: world.barrier())
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("rank-")]
