"""Collectives over MPI, at any number of ranks: right sums, also of several at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch

from dearmpi.comm.algorithms.registry import select_reduce_scatter
from dearmpi.comm.api.collectives import Collectives, ReduceOp
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.config import ReduceScatter, WireDtype
from dearmpi.errors import ConfigError
from tests.codes import raises
from tests.mpi.collectives.contributions import (
    ADDED_HERE,
    ALGORITHMS,
    HALF,
    SHARDS,
    WIDE,
    contribution,
    gather,
    own,
    scatter,
    total,
    whole_numel,
)

SUPPORTED = [
    (algorithm, dtype)
    for algorithm, dtype in product(ALGORITHMS, WIDE + HALF)
    if algorithm in ADDED_HERE or dtype not in HALF
]


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize(("algorithm", "dtype"), SUPPORTED)
def test_reduce_scatter(
    world: World,
    channels: list[Channel],
    algorithm: ReduceScatter,
    dtype: torch.dtype,
    shard: int,
) -> None:
    numel = whole_numel(world, shard, dtype)
    buffer = contribution(world.rank, numel, dtype)
    channels[0].run("RS", scatter(buffer, algorithm))
    assert torch.equal(own(world, buffer), own(world, total(world, numel, dtype)))


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("dtype", WIDE + HALF)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_gather(
    world: World, channels: list[Channel], algorithm: ReduceScatter, dtype: torch.dtype, shard: int
) -> None:
    numel = whole_numel(world, shard, dtype)
    buffer = torch.full((numel,), -1.0, dtype=dtype)
    whole = contribution(0, numel, dtype)
    own(world, buffer).copy_(own(world, whole))
    channels[1].run("AG", gather(buffer, algorithm=algorithm))
    assert torch.equal(buffer, whole)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_move(world: World, channels: list[Channel], dtype: torch.dtype) -> None:
    buffer = torch.full((3,), complex(world.rank, 1), dtype=dtype)
    world.broadcast(buffer)
    assert buffer.tolist() == [1j] * 3
    whole = torch.zeros(world.size, dtype=dtype)
    whole[world.rank : world.rank + 1].fill_(complex(world.rank, 2))
    channels[1].run("AG", gather(whole))
    assert whole.tolist() == [complex(rank, 2) for rank in range(world.size)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_not_a_number_stays_so(
    world: World, channels: list[Channel], algorithm: ReduceScatter
) -> None:
    buffer = torch.zeros(2 * world.size)
    if world.rank == world.size - 1:
        buffer[::2], buffer[1::2] = torch.nan, torch.inf
    channels[0].run("RS", scatter(buffer, algorithm))
    shard = own(world, buffer)
    assert shard[0].isnan() and shard[1].isposinf()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_same_sums_twice(
    world: World, channels: list[Channel], algorithm: ReduceScatter
) -> None:
    """Numbers whose sum depends on the order of adding: the order is always the same."""
    generator = torch.Generator().manual_seed(world.rank)
    values = torch.randn(1001 * world.size, generator=generator)
    runs = []
    for _ in range(3):
        buffer = values.clone()
        channels[0].run("RS", scatter(buffer, algorithm))
        channels[1].run("AG", gather(buffer))
        runs.append(buffer)
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


@pytest.mark.parametrize(("op", "expected"), [("sum", sum), ("max", max), ("min", min)])
def test_all_reduce(
    world: World, channels: list[Channel], op: ReduceOp, expected: Callable[[list[int]], int]
) -> None:
    buffer = torch.full((3,), float(world.rank - 1), dtype=torch.float64)
    channels[0].run("AR", lambda c: c.start_all_reduce(buffer, op))
    assert buffer.tolist() == [float(expected([r - 1 for r in range(world.size)]))] * 3


@pytest.mark.parametrize("dtype", [*WIDE, *HALF, torch.int64, torch.bool])
@pytest.mark.parametrize("numel", [1, 777_777])
def test_broadcast(world: World, dtype: torch.dtype, numel: int) -> None:
    root = world.size - 1
    buffer = contribution(world.rank, numel, dtype)
    world.broadcast(buffer, root=root)
    assert torch.equal(buffer, contribution(root, numel, dtype))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_several_in_flight_on_two_channels(
    world: World, channels: list[Channel], algorithm: ReduceScatter
) -> None:
    """Reduce-scatters under way while all-gathers are, each channel in an order of its own."""
    sizes = [(1 + 3000 * (bucket % 4)) * world.size for bucket in range(12)]
    reduced, gathered = [
        [contribution(world.rank, numel, torch.float32, salt) for salt, numel in enumerate(sizes)]
        for _ in range(2)
    ]
    done: list[int] = []
    for bucket in range(12):
        channels[0].submit(
            f"RS{bucket}", scatter(reduced[bucket], algorithm), partial(done.append, 1)
        )
    for bucket in reversed(range(12)):
        channels[1].submit(f"AG{bucket}", gather(gathered[bucket]), partial(done.append, 1))
    world.progress.wait_until(lambda: len(done) == 24, what="all of them")
    for salt, numel in enumerate(sizes):
        expected = total(world, numel, torch.float32, salt)
        assert torch.equal(own(world, reduced[salt]), own(world, expected))
        rows = [contribution(rank, numel, torch.float32, salt) for rank in range(world.size)]
        shards = [row.chunk(world.size)[rank] for rank, row in enumerate(rows)]
        assert torch.equal(gathered[salt], torch.cat(shards))


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lengths_that_do_not_divide_are_refused(
    world: World, collectives: Collectives, algorithm: ReduceScatter
) -> None:
    buffer, said = torch.ones(world.size + 1), f"{world.size + 1} elements over {world.size} ranks"
    with raises(ConfigError, "buffer-not-divisible", f"reduce-scatter of {said}"):
        collectives.start_reduce_scatter(buffer, algorithm)
    with raises(ConfigError, "buffer-not-divisible", f"all-gather of {said}"):
        collectives.start_all_gather(buffer)


@pytest.mark.parametrize("wire_dtype", [None, "bf16"])
def test_the_fastest_is_one_that_serves(world: World, wire_dtype: WireDtype | None) -> None:
    chosen = select_reduce_scatter(world, torch.ones(world.size), wire_dtype=wire_dtype)
    assert set(world.all_gather_text(chosen)) == {chosen}
    assert chosen in (ALGORITHMS if wire_dtype is None else ADDED_HERE)
