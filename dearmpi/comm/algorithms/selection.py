"""Selection: trials of collectives by themselves, and the algorithm that is fastest in them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

from dearmpi.comm.algorithms.registry import ALGORITHMS, CollectiveAlgorithms
from dearmpi.comm.api.collectives import Buffer, Collectives, Request
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World, Wrap, unchanged
from dearmpi.config import ReduceScatter, WireDtype

Start = Callable[[Collectives], Request]
_NUM_TRIALS = 3


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


def select_reduce_scatter(
    world: World,
    buffer: Buffer,
    *,
    wire_dtype: WireDtype | None = None,
    library_can_add: bool = True,
    wrap: Wrap = unchanged,
) -> ReduceScatter:
    """The algorithm that reduces ``buffer`` in the least time; its contents are lost (collective).

    wire_dtype: in what a wider buffer is to be sent; excludes algorithms by which the library adds.
    library_can_add: whether the library can add all dtypes that are to be reduced.
    wrap: as in ``World.open_channel``.
    The slowest rank's best of a few trials counts, so that every rank selects the same.
    """
    channel = world.open_channel("trial", window=1, wrap=wrap)
    best: dict[ReduceScatter, float] = {}
    for name in get_args(ReduceScatter):
        algorithms = CollectiveAlgorithms(name, wire_dtype)
        if not algorithms.can_reduce or (ALGORITHMS[name].library_adds and not library_can_add):
            continue
        start = partial(algorithms.start_reduce_scatter, buffer)
        best[name] = min(run_all(world, channel, [start]) for _ in range(_NUM_TRIALS))
    channel.close()
    slowest = world.all_reduce(list(best.values()), "max")
    return min(zip(slowest, best, strict=True))[1]
