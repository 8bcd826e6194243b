"""Calibrate: measure what reduce-scatters and all-gathers of this job cost, in a second at most."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dearmpi.comm.trial import Start, run_all, slowest_median, start_gather, start_reduce
from dearmpi.comm.world import Channel, World
from dearmpi.config import ReduceScatter
from dearmpi.errors import ConfigError
from dearmpi.tune.calibration import Calibration, SizeTimes, parse_calibration

_NUM_REPEATS = 3  # fewer where even two sizes take longer than they may
_WINDOWS = (1, 2)


@dataclass(frozen=True, slots=True)
class Rung:
    """Measured together: ``length`` operations of ``nbytes``, one after the other.

    Several, as in training: what a network lets through at once after a pause shall not count.
    """

    nbytes: int
    length: int


_FEWEST_RUNGS = 2  # that a line can be drawn through
LADDER = (Rung(1 << 16, 8), Rung(1 << 19, 2), Rung(1 << 22, 2), Rung(1 << 25, 2))

Operation = Callable[[torch.Tensor], Start]


def calibrate(
    world: World, *, reduce_scatter: ReduceScatter = "ring", library: str = "", budget_s: float = 1
) -> Calibration:
    """Measure both operations, on the engine's way, at sizes as large as the time allows.

    As in training, operations follow one another, with one and with two of them in flight; the
    slowest rank's median counts. The result is the same on all ranks (collective). library: the
    MPI library, in words. budget_s: what all measurements together may take; two sizes are
    measured even if that takes longer.

    Raises ConfigError in a world of one, in which nothing is sent.
    """
    if world.size == 1:
        raise ConfigError("one rank has no collectives to measure; start several with mpirun")
    operations: list[Operation] = [
        lambda buffer: partial(start_reduce, buffer, reduce_scatter),
        lambda buffer: partial(start_gather, buffer),
    ]
    times: list[list[SizeTimes]] = [[] for _ in operations]
    channels = [world.open_channel("trial", window=window) for window in _WINDOWS]
    begin = time.perf_counter()
    for number, rung in enumerate(LADDER):
        left_s = budget_s - world.all_reduce([time.perf_counter() - begin], "max")[0]
        # What is compared is the same on all ranks, so all of them stop here or none.
        if number >= _FEWEST_RUNGS and sum(_expect_s(found, rung) for found in times) > left_s:
            break
        for operation, found in zip(operations, times, strict=True):
            share_s = left_s / len(operations)
            found.append(_measure(world, channels, operation, rung, budget_s=share_s))
    for channel in channels:
        channel.close()
    own = Calibration(world.hosts, library, reduce_scatter, tuple(times[0]), tuple(times[1]))
    return parse_calibration(world.broadcast_text(own.to_json()), "the calibration of rank 0")


def _expect_s(found: Sequence[SizeTimes], rung: Rung) -> float:
    """What all repeats on ``rung`` take, as the last two sizes tell."""
    one, other = found[-2:]
    slope = (other.alone_s - one.alone_s) / (other.nbytes - one.nbytes)
    alone_s = other.alone_s + slope * (rung.nbytes - other.nbytes)
    num_operations = 1 + _NUM_REPEATS * len(_WINDOWS) * rung.length
    return num_operations * max(alone_s, other.alone_s)


def _measure(
    world: World,
    channels: Sequence[Channel],
    operation: Operation,
    rung: Rung,
    *,
    budget_s: float,
) -> SizeTimes:
    """Times of ``operation`` on ``rung``, its size rounded to whole shards (collective)."""
    count = -(-rung.nbytes // (4 * world.size)) * world.size
    # Filled, since a page that nobody has written to is slow at first.
    starts = [operation(torch.empty(count).fill_(0.0)) for _ in range(rung.length)]
    first_s = world.all_reduce([run_all(world, channels[0], starts[:1])], "max")[0]
    affordable = budget_s / (len(channels) * rung.length * first_s)
    repeats = int(min(_NUM_REPEATS, max(1, affordable)))
    each_s = []
    for channel in channels:
        own = [run_all(world, channel, starts) for _ in range(repeats)]
        each_s.append(slowest_median(world, own) / rung.length)
    return SizeTimes(4 * count, each_s[0], 2 * each_s[1])
