"""Rings that share a link: all complete, and what is urgent goes first."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dearmpi.comm.algorithms import algorithm, ring
from dearmpi.comm.algorithms.algorithm import SendScheduler
from dearmpi.comm.algorithms.ring import Ring, RingAllGather, RingReduceScatter, num_receives
from dearmpi.cuts import even_cuts
from tests.unit.comm.wires import End, Post, Wires, context, run, shard


@given(st.integers(2, 5), st.integers(0, 3), st.integers(0, 1 << 32))
def test_rings_that_share_the_wires_all_complete(size: int, most_chunks: int, seed: int) -> None:
    """Whatever each rank finds urgent, and however little may be under way."""
    chance = random.Random(seed)
    schedulers = [SendScheduler() for _ in range(size)]
    wires, shard_numel, num = Wires(), 7, 3
    cuts = even_cuts(size * shard_numel, size)
    summed = [[torch.full((size * shard_numel,), 1.0 + r) for r in range(size)] for _ in range(num)]
    gathered = [
        [torch.full((size * shard_numel,), float(r)) for r in range(size)] for _ in range(num)
    ]
    rings: list[Ring] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "CHUNK_BYTES", 8)
        patch.setattr(algorithm, "MOST_BYTES", 8 * most_chunks)
        for rank in range(size):
            starts = [*range(2 * num)]
            chance.shuffle(starts)  # ranks need not agree on the order either
            for number in starts:
                own = context(End(wires, rank), size, tag=number, scheduler=schedulers[rank])
                if number < num:
                    ahead = num_receives(shard_numel, 4, size)
                    scratch = [torch.empty(2) for _ in range(ahead)]
                    one = RingReduceScatter(own, summed[number][rank], cuts, scratch=scratch)
                    rings.append(one)
                else:
                    rings.append(RingAllGather(own, gathered[number - num][rank], cuts))
        run(wires, rings, chance)
    for rank in range(size):
        for buffers in summed:
            part = shard(buffers[rank], rank, size)
            assert part.tolist() == [size * (size + 1) / 2] * shard_numel
        for buffers in gathered:
            expected = torch.arange(float(size)).repeat_interleave(shard_numel)
            assert torch.equal(buffers[rank], expected)


def test_a_small_reduce_scatter_does_not_queue_behind_a_large_all_gather(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ahead of each of its messages there is what may be under way, never a whole shard."""
    monkeypatch.setattr(ring, "CHUNK_BYTES", 8)
    monkeypatch.setattr(algorithm, "MOST_BYTES", 3 * 8)
    sent: list[str] = []

    class Logging(End):
        def start_send(self, buffer: Any, destination: int, tag: int) -> Post:
            if self.rank == 0:
                sent.append("-gs"[tag])
            return super().start_send(buffer, destination, tag)

    wires, size = Wires(), 3
    schedulers = [SendScheduler() for _ in range(size)]
    contexts = [
        [context(Logging(wires, r), size, tag=tag, scheduler=schedulers[r]) for r in range(size)]
        for tag in (1, 2)
    ]
    whole, small = even_cuts(3 * 40, size), even_cuts(3 * 8, size)
    gathers = [RingAllGather(one, torch.zeros(3 * 40), whole) for one in contexts[0]]
    # Of four chunks per shard: a ring with nothing under way may send whatever else goes on.
    scratch = [torch.empty(2) for _ in range(num_receives(8, 4, size))]
    reduces = [
        RingReduceScatter(one, torch.ones(3 * 8), small, scratch=scratch) for one in contexts[1]
    ]
    chance = random.Random(0)
    while not all([one.test() for one in [*gathers, *reduces]][size:]):
        while wires.deliver_one(chance):
            pass
    before_last = "".join(sent)[: "".join(sent).rindex("s")]
    assert before_last.startswith("gggs") and before_last.count("g") <= 3 + 1 + 3
    assert not any(one.test() for one in gathers)
