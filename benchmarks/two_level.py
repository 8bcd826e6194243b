"""How much faster do collectives within hosts and then between them carry a bucket than flat ones?

Usage: bin/netlab up 2 200mbit; bin/netlab run -p 2 2 python -m benchmarks.two_level
       bin/netlab up 4 200mbit --racks 2 --between 200mbit
       bin/netlab run 4 python -m benchmarks.two_level --topology 2x2/1x1

Reduce-scatters and all-gathers of buckets of 25 MB, two in flight, as the engine posts them: by a
ring of all ranks, and on the grid of ``--topology``; where that has rates, without them too. All
take turns, so that the machine's drift favours none. Prints the median of the slowest rank's times,
and the ratios.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

import dearmpi
from dearmpi.comm.algorithms.grid_collectives import choose_grid
from dearmpi.comm.algorithms.registry import CollectiveAlgorithms, run_all
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig


def main() -> None:
    """Measure, and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="hosts")
    parser.add_argument("--megabytes", type=float, default=25.0, help="of a bucket")
    parser.add_argument("--buckets", type=int, default=4, help="back to back")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    world = dearmpi.connect()
    grid = choose_grid(world, EngineConfig(topology=given.topology))
    if grid is None:
        raise SystemExit(f"topology {given.topology} is flat here: nothing to compare")
    count = int(given.megabytes * 1e6 / 4 / world.size) * world.size
    buffers = [torch.zeros(count) for _ in range(given.buckets)]
    channel = world.open_channel("benchmark", window=EngineConfig().window)
    ways = {
        "flat": CollectiveAlgorithms("ring"),
        **{
            str(one): CollectiveAlgorithms("ring", grid=one)
            for one in (replace(grid, rates=()), grid)
        },
    }
    times: dict[str, list[list[float]]] = {name: [[], []] for name in ways}
    for number in range(given.repeats + 1):
        for name, way in ways.items():
            for half, start in enumerate((way.start_reduce_scatter, way.start_all_gather)):
                own = run_all(world, channel, [partial(start, one) for one in buffers])
                if number:  # the first warms connections up
                    times[name][half].extend(world.all_reduce([own / len(buffers)], "max"))
    report(world, channel, times, given.megabytes)


def report(
    world: World, channel: Channel, times: dict[str, list[list[float]]], megabytes: float
) -> None:
    """Print what was measured. ``times``: by topology, of each half, s per bucket."""
    channel.close()
    medians = {name: [statistics.median(half) for half in halves] for name, halves in times.items()}
    if world.is_root:
        hosts = len(set(world.hosts))
        print(f"{world.size} ranks on {hosts} hosts, buckets of {megabytes:g} MB, ms each")
        print(f"{'topology':10}{'reduce-scatter':>16}{'all-gather':>12}{'both':>8}")
        for name, halves in medians.items():
            print(f"{name:10}{row(halves)}")
        flat, grid, *evened = (sum(halves) for halves in medians.values())
        print(f"two-level over flat: {flat / grid:.2f}")
        for themis in evened:
            print(f"Themis over flat: {flat / themis:.2f}, over two-level: {grid / themis:.2f}")
    world.leave()


def row(halves: Sequence[float]) -> str:
    """Both halves and their sum, in ms."""
    reduces, gathers = (1e3 * seconds for seconds in halves)
    return f"{reduces:16.1f}{gathers:12.1f}{reduces + gathers:8.1f}"


if __name__ == "__main__":
    main()
