"""How much faster do collectives within hosts and then between them carry a bucket than flat ones?

Usage: bin/netlab up 2 200mbit; bin/netlab run -p 2 2 python -m benchmarks.two_level
       bin/netlab up 4 200mbit --racks 2 --between 200mbit
       bin/netlab run 4 python -m benchmarks.two_level --topology 2x2/1x1

Reduce-scatters and all-gathers of buckets of 25 MB, two in flight, as the engine posts them: by a
ring of all ranks, and on the grid of ``--topology``; where that has rates, without them too, and
with each bucket evened out by itself (``uncarried``: ``--megabytes 0.25 --buckets 64``). Beside
them all-reduces of the same buckets by the MPI library, one after the other, and by gloo, all
posted at once as DDP does. All take turns, so that the machine's drift favours none. Prints the
median of the slowest rank's times, and the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

import dearmpi
from dearmpi.bench.torch_methods import join_group, leave_group
from dearmpi.comm.algorithms.grid_collectives import choose_grid
from dearmpi.comm.algorithms.registry import CollectiveAlgorithms, run_all
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.cuts import Cuts, even_cuts
from dearmpi.grid import Grid

Times = dict[str, list[list[float]]]
"""By name, of each half of an all-reduce or of the whole, seconds per bucket."""


def main() -> None:
    """Measure, and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="hosts")
    parser.add_argument("--megabytes", type=float, default=25.0, help="of a bucket")
    parser.add_argument("--buckets", type=int, default=4, help="back to back")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    world = dearmpi.connect()
    grid = choose_grid(world, EngineConfig(topology=given.topology))
    if grid is None:
        raise SystemExit(f"topology {given.topology} is flat here: nothing to compare")
    count = int(given.megabytes * 1e6 / 4 / world.size) * world.size
    buffers = [torch.zeros(count) for _ in range(given.buckets)]
    channel = world.open_channel("benchmark", window=EngineConfig().window)
    ways = ways_of(grid, [even_cuts(count, world.size)] * given.buckets)
    peers = all_reduces(world)
    times: Times = {name: [[], []] for name in ways}
    times.update({name: [[]] for name in peers})
    for number in range(given.repeats + 1):
        for name, way in ways.items():
            pairs = list(zip(way, buffers, strict=True))
            reduces = [partial(one.start_reduce_scatter, buffer) for one, buffer in pairs]
            gathers = [partial(one.start_all_gather, buffer) for one, buffer in pairs]
            for half, starts in enumerate((reduces, gathers)):
                own = run_all(world, channel, starts)
                if number:  # the first warms connections up
                    times[name][half].extend(world.all_reduce([own / len(buffers)], "max"))
        for name, all_reduce in peers.items():
            world.barrier()
            begin = time.perf_counter()
            all_reduce(buffers)
            own = time.perf_counter() - begin
            if number:
                times[name][0].extend(world.all_reduce([own / len(buffers)], "max"))
    leave_group(failed=False)
    report(world, channel, times, given.megabytes, num_ways=len(ways))


def ways_of(grid: Grid, cuts: Sequence[Cuts]) -> dict[str, list[CollectiveAlgorithms]]:
    """By name, how each bucket goes: by a ring, and on ``grid``; with rates also without them, and
    with loads that are not carried on.
    """
    ring, plain = CollectiveAlgorithms("ring"), replace(grid, rates=())
    found = {"flat": [ring] * len(cuts), str(plain): [replace(ring, grid=plain)] * len(cuts)}
    if grid.rates:
        by_themis = replace(ring, grid=grid)
        found["uncarried"] = [by_themis] * len(cuts)
        found[str(grid)] = by_themis.carrying([(one, 4) for one in cuts])
    return found


def all_reduces(world: World) -> dict[str, Callable[[Sequence[torch.Tensor]], None]]:
    """All-reduces of several buckets, by the name of the library (collective)."""
    from mpi4py import MPI  # by now dearmpi has initialised it

    join_group(world)
    comm = MPI.COMM_WORLD.Dup()

    def by_mpi(buffers: Sequence[torch.Tensor]) -> None:
        for buffer in buffers:
            comm.Allreduce(MPI.IN_PLACE, buffer.numpy())

    def by_gloo(buffers: Sequence[torch.Tensor]) -> None:
        for work in [dist.all_reduce(buffer, async_op=True) for buffer in buffers]:
            work.wait()

    library = MPI.Get_library_version().split()[:2]
    name = "Open MPI" if library[0] == "Open" else library[0]
    return {name: by_mpi, "gloo": by_gloo}


def report(
    world: World, channel: Channel, times: Times, megabytes: float, *, num_ways: int
) -> None:
    """Print what was measured, and ratios of the first ``num_ways`` and to what comes after."""
    channel.close()
    medians = {name: [statistics.median(half) for half in halves] for name, halves in times.items()}
    if world.is_root:
        hosts = len(set(world.hosts))
        print(f"{world.size} ranks on {hosts} hosts, buckets of {megabytes:g} MB, ms each")
        print(f"{'topology':10}{'reduce-scatter':>16}{'all-gather':>12}{'both':>8}")
        for name, halves in medians.items():
            print(f"{name:10}{row(halves)}")
        flat, grid, *evened = [sum(halves) for halves in medians.values()][:num_ways]
        print(f"two-level over flat: {flat / grid:.2f}")
        for themis in evened:
            print(f"Themis over flat: {flat / themis:.2f}, over two-level: {grid / themis:.2f}")
        if evened:
            print(f"loads carried over each bucket by itself: {evened[0] / evened[-1]:.2f}")
        best = evened[-1] if evened else grid
        for name, (peer,) in list(medians.items())[num_ways:]:
            print(f"{list(medians)[num_ways - 1]} over the all-reduce of {name}: {peer / best:.2f}")
    world.leave()


def row(halves: Sequence[float]) -> str:
    """Both halves, if they were measured apart, and their sum, in ms."""
    parts = [f"{1e3 * seconds:.1f}" for seconds in halves] if len(halves) == 2 else ["", ""]
    return f"{parts[0]:>16}{parts[1]:>12}{1e3 * sum(halves):8.1f}"


if __name__ == "__main__":
    main()
