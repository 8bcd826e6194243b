"""Rings: right results for any number of ranks, in any order of arrival."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dearmpi.comm.algorithms import algorithm, ring
from dearmpi.comm.algorithms.algorithm import SendScheduler
from dearmpi.comm.algorithms.exchange import RotatedExchange
from dearmpi.comm.algorithms.ring import (
    RingAllGather,
    RingReduceScatter,
    Rounds,
    num_chunks,
    num_receives,
    ring_order,
)
from dearmpi.comm.api.collectives import Movement, Request
from dearmpi.comm.messages.values import HostBuffer
from dearmpi.comm.progress.lane import Lane, Work
from dearmpi.cuts import even_cuts
from tests.unit.comm.wires import End, Post, Wires, context, run, shard


def start_rings(
    wires: Wires,
    inputs: list[Any],
    tag: int = 1,
    wire_dtype: torch.dtype | None = None,
    order: Sequence[int] | None = None,
) -> list[RingReduceScatter]:
    size, shard_numel = len(inputs), inputs[0].numel() // len(inputs)
    width = inputs[0].element_size() if wire_dtype is None else wire_dtype.itemsize
    num = num_receives(shard_numel, width, size)

    def scratch(buffer: Any) -> list[Any]:
        like = buffer if wire_dtype is None else buffer.to(wire_dtype)
        return [like.new_empty(shard_numel) for _ in range(num)]

    return [
        RingReduceScatter(
            context(End(wires, rank), size, tag, order=order),
            buffer,
            even_cuts(buffer.numel(), size),
            scratch=scratch(buffer),
            outgoing=() if wire_dtype is None else scratch(buffer),
        )
        for rank, buffer in enumerate(inputs)
    ]


@given(
    st.integers(1, 6),
    st.integers(1, 20),
    st.sampled_from([8, 24, 1 << 20]),
    st.randoms(use_true_random=False),
)
def test_every_rank_gets_its_shard_of_the_sum(
    size: int, shard_numel: int, chunk_bytes: int, chance: random.Random
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "CHUNK_BYTES", chunk_bytes)
        check_sum(size, shard_numel, chance)


def check_sum(size: int, shard_numel: int, chance: random.Random) -> None:
    generator = torch.Generator().manual_seed(size * 7 + shard_numel)
    whole = torch.randint(-50, 50, (size, size * shard_numel), generator=generator).double()
    buffers = list(whole.clone())
    wires = Wires()
    run(wires, start_rings(wires, buffers, order=chance.sample(range(size), size)), chance)
    for rank, buffer in enumerate(buffers):
        assert torch.equal(shard(buffer, rank, size), shard(whole.sum(0), rank, size))
    assert not any(wires.sends.values()) and not any(wires.receives.values())


@given(st.integers(2, 5), st.randoms(use_true_random=False))
def test_rings_under_way_at_once_do_not_mix(size: int, chance: random.Random) -> None:
    first = torch.arange(size * size * 2.0).reshape(size, -1)
    second = -1000.0 - first
    wires = Wires()
    buffers = [list(first.clone()), list(second.clone())]
    rings = start_rings(wires, buffers[0], tag=1) + start_rings(wires, buffers[1], tag=2)
    run(wires, rings, chance)
    for whole, outputs in zip((first, second), buffers, strict=True):
        for rank, buffer in enumerate(outputs):
            assert torch.equal(shard(buffer, rank, size), shard(whole.sum(0), rank, size))


@given(
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.integers(2, 6),
    st.integers(1, 20),
    st.sampled_from([4, 10, 1 << 20]),
    st.randoms(use_true_random=False),
)
def test_half_precision_on_the_wire_is_off_by_one_rounding_a_hop(
    wire_dtype: torch.dtype, size: int, shard_numel: int, chunk_bytes: int, chance: random.Random
) -> None:
    generator = torch.Generator().manual_seed(size * 7 + shard_numel)
    whole = torch.randn(size, size * shard_numel, generator=generator)
    exact, magnitude = whole.double().sum(0), whole.double().abs().sum(0)
    buffers, wires = list(whole.clone()), Wires()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "CHUNK_BYTES", chunk_bytes)
        run(wires, start_rings(wires, buffers, wire_dtype=wire_dtype), chance)
    unit_roundoff = torch.finfo(wire_dtype).eps / 2
    # fp32 sums add their own, tiny roundings; fp16 has an absolute one near zero.
    bound = ((1 + unit_roundoff) ** (size - 1) - 1 + 1e-6) * magnitude + size * 1e-7
    for rank, buffer in enumerate(buffers):
        error = shard(buffer.double() - exact, rank, size).abs()
        assert bool((error <= shard(bound, rank, size)).all())


def test_what_the_wire_holds_exactly_arrives_exactly_with_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many more chunks than there is memory to send from: sends wait, and none is overwritten."""
    monkeypatch.setattr(ring, "CHUNK_BYTES", 2)
    size, shard_numel = 3, 40
    assert num_chunks(shard_numel, 2) == 40 and num_receives(shard_numel, 2, size) == 6
    whole = (torch.arange(size * size * shard_numel) % 17 - 8.0).reshape(size, -1)
    buffers, wires = list(whole.clone()), Wires()
    rings = start_rings(wires, buffers, wire_dtype=torch.bfloat16)
    assert all(len(sends) == num_receives(shard_numel, 2, size) for sends in wires.sends.values())
    run(wires, rings, random.Random(0))
    for rank, buffer in enumerate(buffers):
        assert torch.equal(shard(buffer, rank, size), shard(whole.sum(0), rank, size))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_any_dtype_that_can_be_added(dtype: torch.dtype) -> None:
    whole = torch.arange(12).reshape(3, 4).repeat(1, 3).to(dtype)
    buffers: list[Tensor] = list(whole.clone())
    wires = Wires()
    run(wires, start_rings(wires, buffers), random.Random(0))
    for rank, buffer in enumerate(buffers):
        assert torch.equal(shard(buffer, rank, 3), shard(whole.sum(0, dtype=dtype), rank, 3))


@pytest.mark.parametrize(
    ("hosts", "order"),
    [
        (("n0", "n0", "n1", "n1"), (0, 1, 2, 3)),
        (("n0", "n1", "n0", "n1"), (0, 2, 1, 3)),
        (("n9", "n1", "n1", "n9", "n0", "n1"), (0, 3, 1, 2, 5, 4)),
        (("n0",) * 3, (0, 1, 2)),
    ],
)
def test_ranks_of_a_host_follow_each_other(hosts: tuple[str, ...], order: tuple[int, ...]) -> None:
    assert ring_order(hosts) == order


def test_a_link_carries_what_goes_around_once_however_ranks_are_dealt_out() -> None:
    hosts = ("n0", "n1") * 3
    sent: Counter[tuple[str, str]] = Counter()

    class Counting(End):
        def start_send(self, buffer: Any, destination: int, tag: int) -> Post:
            sent[hosts[self.rank], hosts[destination]] += buffer.numel()
            return super().start_send(buffer, destination, tag)

    wires, order = Wires(), ring_order(hosts)
    buffers = list(torch.ones(6, 12))
    contexts = [context(Counting(wires, rank), 6, order=order) for rank in range(6)]
    cuts = even_cuts(12, 6)
    rings = [RingAllGather(*both, cuts) for both in zip(contexts, buffers, strict=True)]
    run(wires, rings, random.Random(0))
    assert sent["n0", "n1"] == sent["n1", "n0"] == 5 * 2  # P - 1 shards, and not three times that


def test_host_buffers() -> None:
    buffers = [HostBuffer(np.arange(4.0) + rank) for rank in range(2)]
    wires = Wires()
    run(wires, start_rings(wires, buffers), random.Random(0))
    assert buffers[0].array[:2].tolist() == [1.0, 3.0]
    assert buffers[1].array[2:].tolist() == [5.0, 7.0]


def test_a_ring_is_not_complete_while_a_send_may_still_read_its_buffer() -> None:
    wires = Wires()
    rings = start_rings(wires, list(torch.ones(2, 2)))
    wires.receives[1, 0, 1][0].buffer.fill_(1.0)
    wires.receives[1, 0, 1][0].done = True  # rank 0 has received; nobody has taken its send
    assert not rings[0].test()
    wires.sends[0, 1, 1][0].done = True
    assert rings[0].test()


def test_a_complete_ring_can_be_tested_again_without_adding_twice() -> None:
    buffers = list(torch.ones(2, 2))
    wires = Wires()
    rings = start_rings(wires, buffers)
    run(wires, rings, random.Random(0))
    assert all(one.test() for one in rings)
    assert buffers[0][0] == 2.0


@pytest.mark.parametrize("size", [3, 9])
def test_a_ring_tells_of_each_message(size: int) -> None:
    """So that the polling thread looks for the next one in time."""
    wires = Wires()
    one = start_rings(wires, list(torch.ones(size, size)))[0]
    for number in range(size - 1):
        assert (one.test(), one.movement) == (False, Movement.NONE)
        post = wires.receives[size - 1, 0, 1][number]
        post.buffer.fill_(1.0)
        post.done = True
        assert (one.test(), one.movement) == (False, Movement.MESSAGE)


def test_a_lane_tells_the_most_that_has_happened() -> None:
    class Told(Request):
        def __init__(self, movement: Movement) -> None:
            self.told = movement

        @property
        def movement(self) -> Movement:
            return self.told

        def test(self) -> bool:
            return False

        def start(self) -> Request:
            return self

    lane, one, other = Lane("any", window=2), Told(Movement.NONE), Told(Movement.MESSAGE)
    lane.queue.extend(Work("", told.start, lambda: None) for told in (one, other))
    assert lane.advance() is Movement.OPERATION  # they are posted
    assert lane.advance() is Movement.MESSAGE
    one.told = Movement.OPERATION
    assert lane.advance() is Movement.OPERATION
    one.told = other.told = Movement.NONE
    assert lane.advance() is Movement.NONE


def test_one_rank_posts_nothing() -> None:
    wires = Wires()
    buffer = torch.arange(3.0)
    (alone,) = start_rings(wires, [buffer])
    assert alone.test()
    assert not wires.sends and not wires.receives
    assert buffer.tolist() == [0.0, 1.0, 2.0]


def test_each_rank_moves_its_shards_once() -> None:
    """P - 1 messages of one shard per rank: no reduce-scatter moves less."""
    posted: list[int] = []

    class Counting(End):
        def start_send(self, buffer: Any, destination: int, tag: int) -> Post:
            posted.append(buffer.numel())
            assert destination == (self.rank + 1) % 4
            return super().start_send(buffer, destination, tag)

    wires = Wires()
    buffers = list(torch.ones(4, 12))
    rings = [
        RingReduceScatter(
            context(Counting(wires, rank), 4),
            buffer,
            even_cuts(12, 4),
            scratch=[torch.empty(3) for _ in range(3)],
        )
        for rank, buffer in enumerate(buffers)
    ]
    run(wires, rings, random.Random(0))
    assert posted == [3] * 12


@given(
    st.integers(1, 6),
    st.integers(1, 20),
    st.sampled_from([8, 24, 1 << 20]),
    st.randoms(use_true_random=False),
)
def test_an_all_gather_gives_every_rank_every_shard(
    size: int, shard_numel: int, chunk_bytes: int, chance: random.Random
) -> None:
    whole = torch.arange(size * shard_numel).double()
    buffers = [torch.full_like(whole, -1.0) for _ in range(size)]
    for rank, buffer in enumerate(buffers):
        shard(buffer, rank, size).copy_(shard(whole, rank, size))
    wires, order = Wires(), chance.sample(range(size), size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "CHUNK_BYTES", chunk_bytes)
        contexts = [context(End(wires, rank), size, order=order) for rank in range(size)]
        cuts = even_cuts(whole.numel(), size)
        rings = [RingAllGather(*both, cuts) for both in zip(contexts, buffers, strict=True)]
        run(wires, rings, chance)
    assert all(torch.equal(buffer, whole) for buffer in buffers)
    assert not any(wires.sends.values()) and not any(wires.receives.values())


@given(
    st.integers(1, 6),
    st.integers(1, 20),
    st.sampled_from([8, 24, 1 << 20]),
    st.randoms(use_true_random=False),
)
def test_an_exchange_takes_each_shard_to_its_rank(
    size: int, shard_numel: int, chunk_bytes: int, chance: random.Random
) -> None:
    sent = list(torch.arange(size * size * shard_numel).view(size, -1))
    arrived = [torch.full_like(one, -1) for one in sent]
    wires, cuts = Wires(), even_cuts(sent[0].numel(), size)
    order = chance.sample(range(size), size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "CHUNK_BYTES", chunk_bytes)
        exchanges = [
            RotatedExchange(context(End(wires, rank), size, order=order), *buffers, cuts)
            for rank, buffers in enumerate(zip(sent, arrived, strict=True))
        ]
        run(wires, exchanges, chance)
    for receiver, sender in product(range(size), repeat=2):
        came = shard(arrived[receiver], sender, size)
        left = torch.full_like(came, -1)  # nothing comes from itself
        was_sent = left if sender == receiver else shard(sent[sender], receiver, size)
        assert torch.equal(came, was_sent)


@given(st.integers(2, 6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_an_exchange_ends_beside_rings_that_other_ranks_start_in_another_order(
    size: int, num_chunks: int, chance: random.Random
) -> None:
    wires, cuts = Wires(), even_cuts(size * 4 * num_chunks, size)
    schedulers = [SendScheduler() for _ in range(size)]
    started: list[Rounds] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "CHUNK_BYTES", 16)
        patch.setattr(algorithm, "MOST_BYTES", 16)
        for rank in range(size):
            one = partial(context, End(wires, rank), size, scheduler=schedulers[rank])
            buffers = [torch.zeros(cuts.total) for _ in range(4)]
            starts: list[Callable[[], Rounds]] = [
                partial(RotatedExchange, one(tag=1), buffers[0], buffers[1], cuts),
                partial(RingAllGather, one(tag=2), buffers[2], cuts),
                partial(RotatedExchange, one(tag=3), buffers[3], buffers[1].clone(), cuts),
            ]
            started += [start() for start in chance.sample(starts, 3)]
        run(wires, started, chance)
