"""Collectives over MPI on a grid: the sums of a ring, and the same bits on every rank."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from dearmpi.comm.algorithms.grid_collectives import grid_of
from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.config import WireDtype
from dearmpi.cuts import Cuts, even_cuts
from dearmpi.grid import Grid

SHAPES = {2: ((2, 1),), 3: ((3,),), 4: ((2, 2), (4, 1), (1, 4)), 6: ((2, 3), (3, 2))}
pytestmark = pytest.mark.ranks(2, 4)


def grids(world: World) -> list[Grid]:
    """Of all shapes, and the first one with chunks in both orders by turns."""
    made = [grid_of(shape, world.hosts) for shape in SHAPES[world.size]]
    both = tuple(range(len(made[0].sizes)))
    return [*made, Grid(made[0].sizes, made[0].order, (both, both[::-1]))]


def cuts_of(world: World) -> list[Cuts]:
    """Even of several chunks, of a few elements, and uneven."""
    inner = [200_000 + 3 * rank for rank in range(world.size - 2)]
    return [
        even_cuts(900_001, world.size),
        even_cuts(3, world.size),
        Cuts((0, 0, *inner, 300_000)),
    ]


def test_sums_and_gathers_are_those_of_a_ring(world: World, channels: list[Channel]) -> None:
    for grid in grids(world):
        algorithms = CollectiveAlgorithms("ring", grid=grid)
        for cuts in cuts_of(world):
            drawn = torch.Generator().manual_seed(world.rank)
            row = torch.randn(cuts.total, generator=drawn, dtype=torch.float64)
            flat, buffer, own = row.clone(), row.clone(), cuts.slice_of(world.rank)
            channels[0].run("RS", lambda c: c.start_reduce_scatter(flat, "ring", cuts=cuts))  # noqa: B023
            channels[0].run("RS", partial(algorithms.start_reduce_scatter, buffer, cuts=cuts))
            assert torch.allclose(buffer[own], flat[own], rtol=1e-10, atol=1e-10)
            shard = buffer[own].clone()
            buffer.fill_(torch.nan)[own] = shard
            channels[1].run("AG", lambda c: c.start_all_gather(flat, "ring", cuts=cuts))  # noqa: B023
            channels[1].run("AG", partial(algorithms.start_all_gather, buffer, cuts=cuts))
            assert torch.allclose(buffer, flat, rtol=1e-10, atol=1e-10)
            bits = buffer.view(torch.int16).long().sum().item()
            assert len(set(world.all_gather_text(str(bits)))) == 1


@pytest.mark.parametrize("wire_dtype", ["bf16", "fp16"])
def test_in_half_precision_on_the_wire(
    world: World, channels: list[Channel], wire_dtype: WireDtype
) -> None:
    algorithms = CollectiveAlgorithms("ring", wire_dtype, grid=grids(world)[0])
    buffer, own = torch.ones(100_000 * world.size), even_cuts(100_000 * world.size, world.size)
    channels[0].run("RS", partial(algorithms.start_reduce_scatter, buffer))
    assert bool((buffer[own.slice_of(world.rank)] == world.size).all())
    channels[1].run("AG", partial(algorithms.start_all_gather, buffer))
    assert bool((buffer == world.size).all())


def test_many_at_once_in_both_directions(world: World, channels: list[Channel]) -> None:
    algorithms, done = CollectiveAlgorithms("ring", grid=grids(world)[0]), list[int]()
    buffers = [torch.ones(world.size * (number * 30_000 + 1)) for number in range(10)]
    for number, buffer in enumerate(buffers):
        start = (algorithms.start_reduce_scatter, algorithms.start_all_gather)[number % 2]
        channels[number % 2].submit("", partial(start, buffer), partial(done.append, number))
    world.progress.wait_until(lambda: len(done) == len(buffers), what="all of them")
    for number, buffer in enumerate(buffers):
        own = even_cuts(buffer.numel(), world.size).slice_of(world.rank)
        assert bool((buffer[own] == (1 if number % 2 else world.size)).all())
