"""Rounds over uneven shards: all end, whatever the cuts and delays, and sums are right."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dearmpi.comm.algorithms import algorithm, ring
from dearmpi.comm.algorithms.algorithm import SendScheduler
from dearmpi.comm.algorithms.exchange import RotatedExchange, arrival_cuts
from dearmpi.comm.algorithms.ring import (
    Chunks,
    RingAllGather,
    RingReduceScatter,
    Rounds,
    num_receives,
)
from dearmpi.comm.algorithms.scratch import add_in_order
from dearmpi.cuts import Cuts, even_cuts
from tests.unit.comm.wires import End, Wires, context, run

_CHUNK = 16  # bytes: two elements of fp64, four of fp32
_NUM_SCHEDULES = 1000


def random_cuts(chance: random.Random, size: int) -> Cuts:
    """Of up to 60 elements: one owner, some ranks without a shard, or any."""
    kind = chance.choice(("one owner", "empties", "any", "even"))
    total = chance.randint(0, 60)
    if kind == "even":
        return even_cuts(total, size)
    if kind == "one owner":
        owner = chance.randrange(size)
        return Cuts(tuple([0] * (owner + 1) + [total] * (size - owner)))
    places = [0, total // 3, total] if kind == "empties" else range(total + 1)
    inner = sorted(chance.choice(places) for _ in range(size - 1))
    return Cuts((0, *inner, total))


class Job:
    """One operation on all ranks, with random contents in fp64 or a narrower dtype on the wire."""

    def __init__(self, chance: random.Random, size: int, tag: int) -> None:
        self.kind = chance.choice(("reduce-scatter", "half", "all-gather", "exchange"))
        self.cuts, self.tag = random_cuts(chance, size), tag
        generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
        self.sent = torch.randn(size, self.cuts.total, generator=generator).double()
        if self.kind == "half":  # exact in bf16, so that rounding does not matter
            self.sent = torch.randint(-4, 5, self.sent.shape, generator=generator).double()
        self.buffers = [row.clone() for row in self.sent]
        self.arrived = [
            torch.full((arrival_cuts(self.cuts, rank).total,), torch.nan).double()
            for rank in range(size)
        ]

    def start(self, end: End, size: int, scheduler: SendScheduler, order: Any) -> Rounds:
        own = context(end, size, self.tag, scheduler, order)
        buffer, cuts = self.buffers[end.rank], self.cuts
        if self.kind == "all-gather":
            return RingAllGather(own, buffer, cuts)
        if self.kind == "exchange":
            return RotatedExchange(own, buffer, self.arrived[end.rank], cuts)
        dtype = torch.bfloat16 if self.kind == "half" else torch.float64
        num = num_receives(cuts.largest, dtype.itemsize, size)
        rooms = [[torch.empty(_CHUNK, dtype=dtype) for _ in range(num)] for _ in range(2)]
        outgoing = rooms[1] if self.kind == "half" else ()
        return RingReduceScatter(own, buffer, cuts, scratch=rooms[0], outgoing=outgoing)

    def check(self, rank: int) -> None:
        own, total = self.cuts.slice_of(rank), self.sent.sum(0)
        if self.kind == "all-gather":
            parts = [row[self.cuts.slice_of(other)] for other, row in enumerate(self.sent)]
            assert torch.equal(self.buffers[rank], torch.cat(parts))
            return
        if self.kind == "exchange":
            arrives = arrival_cuts(self.cuts, rank)
            self.arrived[rank][arrives.slice_of(rank)] = self.sent[rank][own]
            parts = [self.arrived[rank][arrives.slice_of(r)] for r in range(len(self.sent))]
            add_in_order(parts, into=self.buffers[rank][own])
        assert torch.allclose(self.buffers[rank][own], total[own], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 4))]
)
def test_random_cuts_and_delays_come_to_their_end(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks start operations in different orders, and may have one chunk under way, or none."""
    monkeypatch.setattr(ring, "CHUNK_BYTES", _CHUNK)
    for seed in range(part, _NUM_SCHEDULES, 4):
        chance = random.Random(seed)
        size = chance.choice((2, 3, 4, 8))
        monkeypatch.setattr(algorithm, "MOST_BYTES", _CHUNK * chance.choice((0, 1, 1, 4)))
        jobs = [Job(chance, size, tag) for tag in range(1, chance.randint(2, 4))]
        order = chance.sample(range(size), size)
        wires, started = Wires(), list[Rounds]()
        for rank in range(size):
            scheduler, end = SendScheduler(), End(wires, rank)
            for job in chance.sample(jobs, len(jobs)):
                started.append(job.start(end, size, scheduler, order))
        run(wires, started, chance)
        for job in jobs:
            for rank in range(size):
                job.check(rank)
        assert not any(wires.sends.values()) and not any(wires.receives.values())
        assert all(one.bytes_out == 0 for one in started)


def test_a_rank_that_only_sends_is_not_starved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent less arrived would stay above what may be in flight for good."""
    monkeypatch.setattr(ring, "CHUNK_BYTES", 8)
    monkeypatch.setattr(algorithm, "MOST_BYTES", 8)
    wires, size, chance = Wires(), 3, random.Random(0)
    schedulers = [SendScheduler() for _ in range(size)]
    cuts = Cuts((0, 40, 40, 40))  # rank 0 owns all, and rank 1 only sends
    buffers = [torch.ones(40) for _ in range(size)]
    scratch = [[torch.empty(2) for _ in range(6)] for _ in range(size)]
    first = [
        RingReduceScatter(context(End(wires, r), size, 1, s), buffers[r], cuts, scratch=scratch[r])
        for r, s in enumerate(schedulers)
    ]
    while sum(one.test() for one in first) < size:
        wires.deliver_one(chance)
    assert first[1].num_arrived == 0
    assert torch.equal(buffers[0], torch.full((40,), 3.0))


@given(st.lists(st.integers(0, 40), min_size=2, max_size=8), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=200)
def test_chunks_cover_each_shard_once(lengths: list[int], width: int) -> None:
    size = len(lengths)
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    cuts = Cuts(tuple(offsets))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "CHUNK_BYTES", 24)
        chunks = Chunks(cuts, range(size), element_size=width)
        slices = [chunks.slice_of(number) for number in range(len(chunks))]
        covered = [index for one in slices for index in range(one.start, one.stop)]
        assert covered == list(range(cuts.total))
        assert all(0 < (one.stop - one.start) * width <= 24 for one in slices)
        for start, stop, length in zip(chunks.starts, chunks.starts[1:], lengths, strict=False):
            two = 2 if 2 * length * width > 24 and length > 1 else 1
            assert stop - start == (max(two, -(-length * width // 24)) if length else 0)
