"""Which reduce-scatter is fastest here, found out by trying."""

from __future__ import annotations

import time
from typing import get_args

from dearmpi.comm.api import Buffer
from dearmpi.comm.world import Channel, World
from dearmpi.config import ReduceScatter

_NUM_TRIALS = 3


def fastest_reduce_scatter(world: World, buffer: Buffer) -> ReduceScatter:
    """The algorithm with the least time for ``buffer``, whose contents are lost (collective).

    The slowest rank's best of a few trials counts, so that every rank chooses alike.
    """
    channel = world.open_channel("trial", window=1)
    best: dict[ReduceScatter, float] = {}
    for algorithm in get_args(ReduceScatter):
        if algorithm == "native" and buffer.element_size() < 4:
            continue  # MPI has no portable half-precision sum
        best[algorithm] = min(
            _seconds(world, channel, buffer, algorithm) for _ in range(_NUM_TRIALS)
        )
    channel.close()
    slowest = world.all_reduce(list(best.values()), "max")
    return min(zip(slowest, best, strict=True))[1]


def _seconds(world: World, channel: Channel, buffer: Buffer, algorithm: ReduceScatter) -> float:
    world.barrier()
    start = time.perf_counter()
    channel.run("trial", lambda collectives: collectives.start_reduce_scatter(buffer, algorithm))
    return time.perf_counter() - start
