"""Collectives over MPI on uneven shards: right sums, the same bits on every rank, and an end."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

from dearmpi.comm.algorithms import algorithm as algorithms
from dearmpi.comm.api.collectives import Collectives, Request
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.config import ReduceScatter, WireDtype
from dearmpi.cuts import Cuts
from tests.mpi.collectives.contributions import ADDED_HERE, ALGORITHMS

pytestmark = pytest.mark.ranks(at_least=2)
_MANY = 300_000  # elements: several chunks


def cuts_of(kind: str, size: int) -> Cuts:
    inner = {
        "the first owns all": [_MANY] * (size - 1),
        "the last owns all": [0] * (size - 1),
        "nobody owns anything": [0] * (size - 1),
        "odd": [7 * (rank + 1) ** 2 for rank in range(size - 1)],
        "large": [_MANY * (rank + 1) // (2 * size) for rank in range(size - 1)],
    }[kind]
    return Cuts((0, *inner, 0 if kind.startswith("nobody") else _MANY))


KINDS = ("the first owns all", "the last owns all", "nobody owns anything", "odd", "large")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_and_gathers(
    world: World,
    channels: list[Channel],
    algorithm: ReduceScatter,
    kind: str,
    dtype: torch.dtype,
) -> None:
    cuts = cuts_of(kind, world.size)
    rows = [_drawn(rank, cuts.total, dtype) for rank in range(world.size)]
    buffer, own = rows[world.rank].clone(), cuts.slice_of(world.rank)
    channels[0].run("RS", lambda c: c.start_reduce_scatter(buffer, algorithm, cuts=cuts))
    expected = sum(row.double() for row in rows)
    assert isinstance(expected, torch.Tensor)
    close = partial(torch.allclose, rtol=1e-12, atol=1e-12 if dtype == torch.float64 else 1e-5)
    assert close(buffer[own].double(), expected[own])
    shard = buffer[own].clone()
    buffer.fill_(torch.nan)[own] = shard
    channels[1].run("AG", lambda c: c.start_all_gather(buffer, algorithm, cuts=cuts))
    assert close(buffer.double(), expected)
    bits = buffer.view(torch.int16).long().sum().item()
    assert len(set(world.all_gather_text(str(bits)))) == 1


@pytest.mark.parametrize("algorithm", ADDED_HERE)
@pytest.mark.parametrize("wire_dtype", ["bf16", "fp16"])
def test_in_half_precision_on_the_wire(
    world: World, channels: list[Channel], algorithm: ReduceScatter, wire_dtype: WireDtype
) -> None:
    cuts = cuts_of("odd", world.size)
    buffer, own = torch.ones(cuts.total), cuts.slice_of(world.rank)
    how: Any = {"wire_dtype": wire_dtype, "cuts": cuts}
    channels[0].run("RS", lambda c: c.start_reduce_scatter(buffer, algorithm, **how))
    assert bool((buffer[own] == world.size).all())
    channels[1].run("AG", lambda c: c.start_all_gather(buffer, algorithm, **how))
    assert bool((buffer == world.size).all())


@pytest.mark.parametrize("most_bytes", [0, 1 << 19])
def test_many_at_once_end_with_one_chunk_in_flight(
    world: World, channels: list[Channel], most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(algorithms, "MOST_BYTES", most_bytes)
    chance, done, buffers = random.Random(0), list[int](), list[torch.Tensor]()
    for number in range(40):
        cuts = cuts_of(chance.choice(KINDS), world.size)
        buffer = torch.ones(cuts.total)
        buffers.append(buffer)
        start = partial((_gather, _reduce)[number % 2], buffer, cuts)
        channels[number % 2].submit(f"{number}", start, partial(done.append, number))
    world.progress.wait_until(lambda: len(done) == len(buffers), what="all of them")


def _reduce(buffer: torch.Tensor, cuts: Cuts, collectives: Collectives) -> Request:
    return collectives.start_reduce_scatter(buffer, "ring", cuts=cuts)


def _gather(buffer: torch.Tensor, cuts: Cuts, collectives: Collectives) -> Request:
    return collectives.start_all_gather(buffer, "ring", cuts=cuts)


def _drawn(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
