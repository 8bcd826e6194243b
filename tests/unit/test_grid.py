"""Loads that Themis carries from bucket to bucket: what all together send in a dimension."""

from __future__ import annotations

import math
import random
from typing import get_args

import pytest

from dearmpi.cuts import Cuts, even_cuts
from dearmpi.grid import Grid, carried, num_chunks, parts_entering, stages_of
from dearmpi.plan.model.network import Levels, Network, link_network
from dearmpi.plan.model.steps_check import Kind, check_steps, grid_steps

CASES = [
    ((2, 2), (1.0, 1.0)),
    ((8, 8), (1.0, 1.0)),
    ((2, 4), (1.0, 2.0)),
    ((2, 2, 2), (1.0, 2.0, 4.0)),
    ((2, 2, 2), (1.0, 1.0, 1.0)),
]
PIECE = (1 << 16) // 4  # elements of fp32 that a shard has at least in each chunk


def grid_of(sizes: tuple[int, ...], rates: tuple[float, ...]) -> Grid:
    return Grid(sizes, tuple(range(math.prod(sizes))), rates=rates)


def sent(grid: Grid, cuts: Cuts) -> list[float]:
    """Bytes of fp32 that rank 0 sends in each dimension in a reduce-scatter, stage by stage."""
    count = num_chunks(cuts, 4)
    found = [0.0] * len(grid.sizes)
    for order in grid.orders_for(count):
        for stage in stages_of(grid, 0, order):
            shards = sum(len(peer.shards) for peer in stage.after)
            found[stage.dimension] += 4 * shards * cuts.largest / count
    return found


def busy_s(grids: list[Grid], buffers: list[Cuts]) -> list[float]:
    """How long all buffers together keep each dimension."""
    each = [sent(grid, cuts) for grid, cuts in zip(grids, buffers, strict=True)]
    rates = grids[0].rates
    return [sum(part) / rate for part, rate in zip(zip(*each, strict=True), rates, strict=True)]


@pytest.mark.parametrize(("sizes", "rates"), CASES)
def test_buckets_of_one_chunk_take_the_orders_of_one_buffer_of_many(
    sizes: tuple[int, ...], rates: tuple[float, ...]
) -> None:
    grid = grid_of(sizes, rates)
    one = even_cuts(PIECE * grid.num_ranks, grid.num_ranks)
    assert num_chunks(one, 4) == 1
    grids = carried(grid, [(one, 4)] * 64)
    assert tuple(order for own in grids for order in own.orders_for(1)) == grid.orders_for(64)


@pytest.mark.parametrize(("sizes", "rates"), CASES)
def test_buckets_of_any_sizes_keep_all_dimensions_as_long(
    sizes: tuple[int, ...], rates: tuple[float, ...]
) -> None:
    """But for one chunk, wherever the rates let them; each by itself leaves them uneven."""
    grid, chance = grid_of(sizes, rates), random.Random(7)
    numels = [chance.randint(1, 3 * PIECE) for _ in range(200)]
    buffers = [even_cuts(numel * grid.num_ranks, grid.num_ranks) for numel in numels]
    together = busy_s(carried(grid, [(cuts, 4) for cuts in buffers]), buffers)
    alone = busy_s([grid] * len(buffers), buffers)
    largest_s = max(4 * cuts.total for cuts in buffers) / min(rates)
    assert max(together) - min(together) <= largest_s < max(alone) - min(alone)


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize(("sizes", "rates"), CASES)
def test_buckets_with_loads_are_right_and_wait_for_nothing_for_ever(
    sizes: tuple[int, ...], rates: tuple[float, ...], kind: Kind
) -> None:
    grid, chance = grid_of(sizes, rates), random.Random(3)
    pieces = [chance.randint(1, 9) for _ in range(6)]
    cuts = [even_cuts(number * PIECE * grid.num_ranks, grid.num_ranks) for number in pieces]
    for own, one in zip(carried(grid, [(one, 4) for one in cuts]), cuts, strict=True):
        check_steps(grid_steps(own, num_chunks(one, 4), kind))


def test_without_rates_nothing_is_carried_nor_by_what_is_empty() -> None:
    one = even_cuts(400, 4)
    assert carried(Grid((2, 2), (0, 1, 2, 3)), [(one, 4)] * 3) == [Grid((2, 2), (0, 1, 2, 3))] * 3
    grid = grid_of((2, 2), (1.0, 1.0))
    first, empty, second = carried(grid, [(one, 4), (even_cuts(0, 4), 4), (one, 4)])
    assert first.orders_for(1) == empty.orders_for(1) == ((0, 1),)
    assert second.orders_for(1) == ((1, 0),)


@pytest.mark.parametrize(("sizes", "rates"), CASES)
def test_the_simulator_reads_what_buckets_send(
    sizes: tuple[int, ...], rates: tuple[float, ...]
) -> None:
    grid, chance = grid_of(sizes, rates), random.Random(5)
    cuts = [even_cuts(chance.randint(1, 9) * PIECE, grid.num_ranks) for _ in range(30)]
    buffers = [(one, 4) for one in cuts]
    each = [sent(own, one) for own, one in zip(carried(grid, buffers), cuts, strict=True)]
    total = 4 * sum(one.total for one in cuts)
    for number, part in enumerate(parts_entering(sizes, rates, buffers)):
        share = sum(one[number] for one in each) / total
        assert part * (1 - 1 / sizes[number]) == pytest.approx(share, rel=1e-9)
    network = Network(
        "own wires",
        link_network("flat", 0.0, 1e-9, "").costs,
        "",
        levels=Levels(tuple(link_network("one", 0.0, 1e-9 / rate, "").costs for rate in rates)),
        sizes=sizes,
        rates=rates,
    )
    few = network.grouped_at(grid.num_ranks, [(even_cuts(PIECE, grid.num_ranks), 4)])
    many = network.grouped_at(grid.num_ranks, [(even_cuts(PIECE, grid.num_ranks), 4)] * 64)
    assert many.reduce_scatter.beta_s_per_byte <= few.reduce_scatter.beta_s_per_byte
