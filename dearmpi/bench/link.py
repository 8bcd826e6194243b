"""Communication alone: a plan's collectives with nothing to hide them behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from dearmpi.bench.result import LinkTimes
from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.algorithms.selection import Start, run_all, select_reduce_scatter
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.engine.device.comm_stream import compute_on_one_core
from dearmpi.plan.data.layout import Bucket


def measure_link(
    world: World,
    buckets: Sequence[Bucket],
    config: EngineConfig,
    *,
    repeats: int,
    warm_up_s: float = 0,
) -> list[LinkTimes]:
    """All reduce-scatters, then all all-gathers, as the engine posts them (collective).

    The time is that of the slowest rank. Before the first, one of either kind is not measured.
    warm_up_s: for how long to measure before that in vain, where there are several hosts, since new
    TCP connections carry less at first.
    """
    compute_on_one_core(world)
    reduces, gathers = _starts(world, buckets, config)
    channel = world.open_channel("benchmark", window=config.window)
    for first in (reduces[-1:], gathers[:1]):  # of one buffer: not both in flight
        run_all(world, channel, first)

    def measure() -> LinkTimes:
        own = [run_all(world, channel, reduces), run_all(world, channel, gathers)]
        return LinkTimes(*world.all_reduce(own, "max"))

    begin = time.perf_counter()
    if len(set(world.hosts)) > 1:
        while world.all_reduce([time.perf_counter() - begin], "max")[0] < warm_up_s:
            measure()
    times = [measure() for _ in range(repeats)]
    channel.close()
    return times


def _starts(
    world: World, buckets: Sequence[Bucket], config: EngineConfig
) -> tuple[list[Start], list[Start]]:
    """Reduce-scatters in the order of backprop, and all-gathers in that of feed-forward."""
    buffers = [
        # Filled, since zeros come without memory, which the first to write to would wait for.
        torch.empty(bucket.padded_numel, dtype=getattr(torch, bucket.dtype)).fill_(0)
        for bucket in buckets
    ]
    if config.reduce_scatter == "auto":
        largest = max(buffers, key=lambda b: b.numel())
        algorithm = select_reduce_scatter(world, largest, wire_dtype=config.wire_dtype)
    else:
        algorithm = config.reduce_scatter
    algorithms = CollectiveAlgorithms(algorithm, config.wire_dtype)
    reduces: list[Start] = [
        partial(algorithms.start_reduce_scatter, buffer) for buffer in reversed(buffers)
    ]
    gathers: list[Start] = [partial(algorithms.start_all_gather, buffer) for buffer in buffers]
    return reduces, gathers
