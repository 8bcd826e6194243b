"""Calibrate: measure what reduce-scatters and all-gathers of this job cost, in a second at most."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from dearmpi.comm.trial import Start, run_all, slowest_median, start_gather, start_reduce
from dearmpi.comm.world import Channel, World
from dearmpi.config import ReduceScatter
from dearmpi.errors import ConfigError
from dearmpi.tune.calibration import Calibration, SizeTimes, parse_calibration

_SIZES = tuple(2**exponent for exponent in range(14, 26, 2))  # 16 KiB to 16 MiB
_FEWEST_SIZES = 3
_NUM_REPEATS = 5
_WINDOW = 2  # as many in flight as a pair needs

Operation = Callable[[torch.Tensor], Start]


def calibrate(
    world: World, *, reduce_scatter: ReduceScatter = "ring", library: str = "", budget_s: float = 1
) -> Calibration:
    """Measure both operations, on the engine's way, at sizes as large as the time allows.

    Every operation runs alone and as one of two, and the slowest rank's median counts. The result
    is the same on all ranks (collective). library: the MPI library, in words. budget_s: what all
    measurements together may take; three sizes are measured even if that takes longer.

    Raises ConfigError in a world of one, in which nothing is sent.
    """
    if world.size == 1:
        raise ConfigError("one rank has no collectives to measure; start several with mpirun")
    operations: list[Operation] = [
        lambda buffer: partial(start_reduce, buffer, reduce_scatter),
        lambda buffer: partial(start_gather, buffer),
    ]
    ladders: list[list[SizeTimes]] = [[] for _ in operations]
    channel = world.open_channel("trial", window=_WINDOW)
    left_s = budget_s
    for number, size in enumerate(_SIZES):
        rung = [_measure(world, channel, operation, size) for operation in operations]
        for ladder, times in zip(ladders, rung, strict=True):
            ladder.append(times)
        spent_s = sum((1 + _NUM_REPEATS) * (times.alone_s + times.pair_s) for times in rung)
        left_s -= spent_s
        # The times are the same on all ranks, so all of them stop here or none.
        if number + 1 >= _FEWEST_SIZES and left_s < _growth(number) * spent_s:
            break
    channel.close()
    own = Calibration(world.hosts, library, reduce_scatter, tuple(ladders[0]), tuple(ladders[1]))
    return parse_calibration(world.broadcast_text(own.to_json()), "the calibration of rank 0")


def _growth(number: int) -> float:
    """How much longer the next size may take than size ``number``; 0 behind the last."""
    return _SIZES[number + 1] / _SIZES[number] if number + 1 < len(_SIZES) else 0.0


def _measure(world: World, channel: Channel, operation: Operation, size: int) -> SizeTimes:
    """Times of ``operation`` on ``size`` bytes, rounded to whole shards (collective)."""
    count = -(-size // (4 * world.size)) * world.size
    pair = [operation(torch.zeros(count)) for _ in range(2)]
    run_all(world, channel, pair)
    alone = [run_all(world, channel, pair[:1]) for _ in range(_NUM_REPEATS)]
    both = [run_all(world, channel, pair) for _ in range(_NUM_REPEATS)]
    return SizeTimes(4 * count, slowest_median(world, alone), slowest_median(world, both))
