"""Trials: collectives by themselves, on the way that the engine's take, and their time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from dearmpi.comm.api.collectives import Collectives, Request
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World

Start = Callable[[Collectives], Request]


def run_all(world: World, channel: Channel, starts: Sequence[Start]) -> float:
    """Start all of them together on every rank; the seconds until the last is complete here."""
    done: list[float] = []
    world.barrier()
    begin = time.perf_counter()
    for start in starts:
        channel.submit("trial", start, lambda: done.append(time.perf_counter()))
    world.progress.wait_until(lambda: len(done) == len(starts), what="the trial's collectives")
    return max(done, default=begin) - begin


def slowest_median(world: World, own: Sequence[float]) -> float:
    """The median of the slowest rank's times (collective)."""
    return statistics.median(world.all_reduce(own, "max"))
