"""Calibrate: measure what reduce-scatters and all-gathers of this job cost, in a second at most."""

from __future__ import annotations

from functools import partial

import torch

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms, Operation
from dearmpi.comm.algorithms.selection import run_all
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from dearmpi.tune.calibration import Calibration, parse_calibration
from dearmpi.tune.ladder import LADDER, WINDOWS, Run, climb


def calibrate(
    world: World,
    algorithms: CollectiveAlgorithms,
    *,
    library: str = "",
    budget_s: float = 1,
    warm_up_s: float = 0,
    most_bytes: int = LADDER[-1].nbytes,
) -> Calibration:
    """Measure both operations, on the engine's way, at sizes as large as the time allows.

    As in training, operations follow one another, with one and with two of them in flight; the
    least of the slowest rank's times counts. The result is the same on all ranks (collective).
    algorithms: how the fp32 buffers are sent, whose bytes count. library: the MPI library's name.
    budget_s: what all measurements together may take. warm_up_s: for how long to measure before
    that in vain, since new TCP connections carry less at first. most_bytes: of one buffer; a few
    are in use at once. Two sizes are measured even if that takes longer, or more.

    Raises ConfigError in a world of one, in which nothing is sent.
    """
    if world.size == 1:
        raise ConfigError("one rank has no collectives to measure; start several with mpirun")
    channels = {window: world.open_channel("trial", window=window) for window in WINDOWS}
    operations = (algorithms.start_reduce_scatter, algorithms.start_all_gather)
    prepared = [partial(_prepare, world, channels, operation) for operation in operations]
    if warm_up_s > 0:
        climb(world, prepared, budget_s=warm_up_s, most_bytes=most_bytes)
    reduces, gathers = climb(world, prepared, budget_s=budget_s, most_bytes=most_bytes)
    for channel in channels.values():
        channel.close()
    own = Calibration(world.hosts, library, algorithms.reduce_scatter, reduces, gathers)
    return parse_calibration(world.broadcast_text(own.to_json()), "the calibration of rank 0")


def _prepare(
    world: World, channels: dict[int, Channel], operation: Operation, numel: int, count: int
) -> Run:
    # Filled, since a page that nobody has written to is slow at first.
    starts = [
        partial(operation, torch.empty(numel, dtype=torch.float32, device="cpu").fill_(0.0))
        for _ in range(count)
    ]
    return lambda num, window: run_all(world, channels[window], starts[:num])
