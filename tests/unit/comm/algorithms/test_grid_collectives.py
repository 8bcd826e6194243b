"""The grid: every shape, order and delay ends with right sums, the same bits on every rank."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dearmpi import grid as grids
from dearmpi.comm.algorithms import algorithm
from dearmpi.comm.algorithms.algorithm import SendScheduler
from dearmpi.comm.algorithms.grid_collectives import GridAlgorithm, choose_grid, grid_of
from dearmpi.comm.api.collectives import Request
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.cuts import Cuts, even_cuts
from dearmpi.errors import ConfigError
from dearmpi.grid import Grid, carried, num_chunks, piece, stages_of
from tests.codes import raises
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks
from tests.unit.comm.algorithms.test_registry import Nothing
from tests.unit.comm.wires import End, Wires, run

SHAPES = ((2, 2), (2, 3), (3, 2), (2, 2, 2), (4,), (2, 2, 2, 2), (4, 2))


class Ends(Nothing):
    """One rank's access to the wires, as a library offers it."""

    def __init__(
        self,
        wires: Wires,
        rank: int,
        hosts: tuple[str, ...],
        scheduler: SendScheduler,
        tag: int = 0,
    ) -> None:
        super().__init__(rank=rank, hosts=hosts, scheduler=scheduler)
        self._num_tags = tag  # before the first
        self._end = End(wires, rank)

    def start_send(self, buffer: Any, destination: int, tag: int) -> Request:
        return self._end.start_send(buffer, destination, tag)

    def start_receive(self, buffer: Any, source: int, tag: int) -> Request:
        return self._end.start_receive(buffer, source, tag)


def orders_of(chance: random.Random, num_dimensions: int) -> tuple[tuple[int, ...], ...]:
    """None, or some of all orders in which chunks may cross the dimensions."""
    every = list(itertools.permutations(range(num_dimensions)))
    return tuple(chance.sample(every, chance.randint(0, min(3, len(every)))))


def cuts_of(chance: random.Random, size: int) -> Cuts:
    """Even, or uneven with empty shards."""
    if chance.random() < 0.7:
        return even_cuts(chance.randint(0, 16 * size), size)
    total = chance.randint(0, 100)
    return Cuts((0, *sorted(chance.randint(0, total) for _ in range(size - 1)), total))


@pytest.mark.parametrize("part", range(2))
def test_random_grids_and_delays_come_to_their_end(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two reduce-scatters and two all-gathers at once, which may have nothing under way."""
    monkeypatch.setattr(grids, "_LEAST_PIECE_BYTES", 16)
    monkeypatch.setattr(grids, "_ALIGNED", 1)
    for seed in range(part, 50, 2):
        chance = random.Random(seed)
        shape = chance.choice(SHAPES)
        size = math.prod(shape)
        monkeypatch.setattr(algorithm, "MOST_BYTES", chance.choice((0, 64, 1 << 20)))
        hosts = tuple(f"n{rank % (size // shape[0])}" for rank in range(size))  # in turn
        grid = grid_of(shape, hosts)
        grid = Grid(grid.sizes, grid.order, orders_of(chance, len(shape)))
        _try(grid, hosts, chance)


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (2, 2, 2), (4, 2), (4, 1), (1, 4)])
def test_themis_sums_what_a_flat_collective_does(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the rates and delays; each rank ends, with the same bits as the others."""
    monkeypatch.setattr(grids, "_LEAST_PIECE_BYTES", 16)
    monkeypatch.setattr(grids, "_ALIGNED", 1)
    size = math.prod(shape)
    hosts = tuple(f"n{rank}" for rank in range(size))
    for seed in range(8):
        chance = random.Random(seed)
        monkeypatch.setattr(algorithm, "MOST_BYTES", chance.choice((0, 64, 1 << 20)))
        rates = tuple(chance.choice((0.5, 1.0, 3.0)) for _ in shape)
        _try(grid_of(shape, hosts, rates=rates if seed else (1.0,) * len(shape)), hosts, chance)


def test_themis_evens_out_what_each_dimension_sends() -> None:
    """2 x 2 over equal wires: 3/8 of a buffer in each, where two levels send 1/2 and 1/4."""
    hosts = ("n0", "n1", "n2", "n3")
    for rates, expected in (((), (8, 4)), ((1, 1), (6, 6)), ((2, 1), (8, 4))):
        grid = grid_of((2, 2), hosts, rates=rates)
        sent = [0, 0]
        for order in grid.orders_for(8):
            for stage in stages_of(grid, 0, order):
                sent[stage.dimension] += sum(len(peer.shards) for peer in stage.after)
        assert tuple(sent) == tuple(2 * part for part in expected)


def test_dimensions_with_rates_have_a_wire_of_their_own() -> None:
    """Which communicators of a rank share; memory of a host is none, and keeps its own."""
    hosts = ("n0", "n0", "n1", "n1", "n2", "n2", "n3", "n3")
    scheduler = SendScheduler()
    ends = [Ends(Wires(), 0, hosts, scheduler, tag) for tag in (0, 100)]
    with_rates = [
        GridAlgorithm(end, grid_of((2, 2, 2), hosts, rates=(9, 1, 1)))._schedulers for end in ends
    ]
    assert with_rates[0][1:] == with_rates[1][1:] == [scheduler, scheduler.beside(2)]
    assert scheduler not in (with_rates[0][0], scheduler.beside(2))
    shared = GridAlgorithm(ends[0], grid_of((2, 2, 2), hosts))._schedulers
    assert shared[1:] == [scheduler, scheduler]


def _try(grid: Grid, hosts: tuple[str, ...], chance: random.Random) -> None:
    size, wires = grid.num_ranks, Wires()
    all_cuts = [cuts_of(chance, size) for _ in range(2)]
    rows = [torch.randn(size, cuts.total, dtype=torch.float64) for cuts in all_cuts]
    reduced, gathered = ([list(one.clone()) for one in rows] for _ in range(2))
    started: list[Request] = []
    grids = carried(grid, [(cuts, 8) for cuts in all_cuts])
    for rank in range(size):
        scheduler = SendScheduler()
        ends = [Ends(wires, rank, hosts, scheduler, tag) for tag in (0, 100)]
        for carrying, cuts, sums, shards in zip(grids, all_cuts, reduced, gathered, strict=True):
            carrier, (reduce, gather) = sums[rank], (GridAlgorithm(one, carrying) for one in ends)
            started.append(reduce.start_reduce_scatter(sums[rank], cuts, carrier=carrier))
            started.append(gather.start_all_gather(shards[rank], cuts))
    run(wires, started, chance)
    for cuts, one, sums, shards in zip(all_cuts, rows, reduced, gathered, strict=True):
        owned = [cuts.slice_of(rank) for rank in range(size)]
        for rank, own in enumerate(owned):
            assert torch.allclose(sums[rank][own], one.sum(0)[own], rtol=1e-12, atol=1e-12)
            assert torch.equal(shards[rank], torch.cat([one[r][o] for r, o in enumerate(owned)]))
    assert not any(wires.sends.values()) and not any(wires.receives.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_half_precision_is_added_in_the_wider_dtype(shape: tuple[int, ...]) -> None:
    size, wires = math.prod(shape), Wires()
    hosts = ("n0",) * size
    cuts = even_cuts(30 * size, size)
    buffers = [torch.full((cuts.total,), 1 + 2**-8 * (rank % 2)) for rank in range(size)]
    carrier = torch.empty(0, dtype=torch.bfloat16)
    started: list[Request] = [
        GridAlgorithm(
            Ends(wires, rank, hosts, SendScheduler()), grid_of(shape, hosts)
        ).start_reduce_scatter(buffers[rank], cuts, carrier=carrier)
        for rank in range(size)
    ]
    run(wires, started, random.Random(0))
    for rank, buffer in enumerate(buffers):
        error = (buffer[cuts.slice_of(rank)] - size).abs().max()
        assert error <= size * len(shape) * 2**-8 and buffer.dtype == torch.float32


@pytest.mark.parametrize("shape", SHAPES)
def test_every_rank_sends_what_a_ring_sends(shape: tuple[int, ...]) -> None:
    """In any order all dimensions together carry all shards but one."""
    size = math.prod(shape)
    grid = grid_of(shape, ("n0",) * size)
    for order in itertools.permutations(range(len(shape))):
        for rank in range(size):
            stages = stages_of(grid, rank, order)
            assert sum(len(p.shards) for s in stages for p in s.after) == size - 1
            assert stages[-1].kept == (rank,)


def test_hosts_are_the_outer_dimension() -> None:
    hosts = ("a", "b", "a", "b", "a", "b")
    grid = grid_of((3, 1, 2), hosts)
    assert grid.sizes == (3, 2) and grid.order == (0, 2, 4, 1, 3, 5)
    assert [grid.crosses_hosts(d, hosts) for d in range(2)] == [False, True]
    inner, outer = stages_of(grid, 3, (0, 1))
    assert [peer.rank for peer in inner.after] == [5, 1] and inner.kept == (2, 3)
    assert [(peer.rank, peer.shards) for peer in outer.after] == [(2, (2,))]


def chosen(topology: str, hosts: Sequence[str]) -> list[str]:
    """The grid on each rank, as text."""

    def body(world: World) -> str:
        return str(choose_grid(world, EngineConfig(topology=topology)))

    return run_ranks(len(hosts), body, hub=FakeHub(len(hosts), hosts=list(hosts)))


def test_hosts_give_the_sizes_of_the_grid() -> None:
    assert chosen("hosts", "aabb") == ["2x2"] * 4
    assert chosen("hosts", "ababab") == ["3x2"] * 6
    assert chosen("hosts", "abcd") == chosen("hosts", "aaaa") == ["None"] * 4
    assert chosen("1x4", "aabb") == chosen("flat", "aabb") == ["None"] * 4
    assert chosen("2x1x2", "aabb") == ["2x2"] * 4
    assert chosen("2x1x2/3x9x1.5", "aabb") == ["2x2/3x1.5"] * 4


def test_uneven_hosts_are_flat_with_a_line_that_says_why() -> None:
    with pytest.warns(UserWarning, match="from 1 to 2 ranks") as warned:
        assert chosen("hosts", "aab") == ["None"] * 3
    assert len(warned) == 1  # of rank 0


def test_sizes_that_do_not_fit_are_refused() -> None:
    with raises(ConfigError, "topology-misfit", "2x3", "6", "4"):
        chosen("2x3", "aabb")
    with raises(ConfigError, "topology-misfit", "2x3", "6", "1"):
        chosen("2x3", "a")


@pytest.mark.parametrize("numel", [0, 1, 100, 4_000_001])
def test_pieces_cover_each_shard_once(numel: int) -> None:
    for cuts in (even_cuts(numel, 4), Cuts((0, 0, numel // 2, numel, numel))):
        num = num_chunks(cuts, 4)
        for rank in range(4):
            pieces = [piece(cuts, rank, chunk, num) for chunk in range(num)]
            assert [one.stop for one in pieces[:-1]] == [one.start for one in pieces[1:]]
            assert (pieces[0].start, pieces[-1].stop) == cuts.range_of(rank)
