"""Communication alone: a plan's collectives with nothing to hide them behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dearmpi.bench.result import LinkTimes
from dearmpi.comm.api import Collectives, Request
from dearmpi.comm.choose import fastest_reduce_scatter
from dearmpi.comm.world import Channel, World
from dearmpi.config import EngineConfig, ReduceScatter
from dearmpi.plan.layout import BucketLayout

Start = Callable[[Collectives], Request]


def measure_link(
    world: World, layout: BucketLayout, config: EngineConfig, *, repeats: int
) -> list[LinkTimes]:
    """All reduce-scatters, then all all-gathers, as the engine posts them (collective).

    The time is that of the slowest rank. Nothing is measured in the first, extra repetition.
    """
    buffers = [
        torch.zeros(bucket.padded_numel, dtype=getattr(torch, bucket.slots[0].spec.dtype))
        for bucket in layout
    ]
    if config.reduce_scatter == "auto":
        algorithm = fastest_reduce_scatter(world, max(buffers, key=lambda b: b.numel()))
    else:
        algorithm = config.reduce_scatter
    reduces = [partial(start_reduce, buffer, algorithm) for buffer in reversed(buffers)]
    gathers = [partial(start_gather, buffer) for buffer in buffers]
    channel = world.open_channel("benchmark", window=config.window)
    run_all(world, channel, [reduces[-1], gathers[0]])
    times = []
    for _ in range(repeats):
        own = [run_all(world, channel, reduces), run_all(world, channel, gathers)]
        slowest = world.all_reduce(own, "max")
        times.append(LinkTimes(slowest[0], slowest[1]))
    channel.close()
    return times


def run_all(world: World, channel: Channel, starts: Sequence[Start]) -> float:
    """Start all of them together on every rank; the seconds until the last is complete here."""
    done: list[float] = []
    world.barrier()
    begin = time.perf_counter()
    for start in starts:
        channel.submit("benchmark", start, lambda: done.append(time.perf_counter()))
    world.progress.wait_until(lambda: len(done) == len(starts), what="the benchmark's collectives")
    return max(done, default=begin) - begin


def start_reduce(buffer: Any, algorithm: ReduceScatter, collectives: Collectives) -> Request:
    """Post the reduce-scatter of ``buffer``."""
    return collectives.start_reduce_scatter(buffer, algorithm)


def start_gather(buffer: Any, collectives: Collectives) -> Request:
    """Post the all-gather of ``buffer``."""
    return collectives.start_all_gather(buffer)
