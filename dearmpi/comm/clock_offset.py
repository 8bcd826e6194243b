"""Clock offset: how far the clocks of the ranks are apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dearmpi.comm.messages.values import HostBuffer
from dearmpi.comm.world import World


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Seconds to add to this rank's clock to get rank 0's.

    The true offset is within ``uncertainty_s`` of it, if the clocks run at one speed.
    """

    offset_s: float
    uncertainty_s: float


def measure_clock(
    world: World,
    *,
    origin_s: float = 0.0,
    now: Callable[[], float] = time.perf_counter,
    num_rounds: int = 20,
) -> ClockOffset:
    """Compare this rank's clock with rank 0's (collective); both count from their ``origin_s``.

    No rank leaves an all-reduce before every rank has entered it. So each round bounds the offset
    from both sides: this rank left after rank 0 had entered, and rank 0 after this rank had. The
    bounds of all rounds hold together.
    """
    entered, left = np.empty(num_rounds), np.empty(num_rounds)
    for number in range(num_rounds):
        entered[number] = now() - origin_s
        world.barrier()
        left[number] = now() - origin_s
    reference = np.concatenate([entered, left])  # rank 0's, once it has been broadcast
    world.broadcast(HostBuffer(reference))
    least = float(np.max(reference[:num_rounds] - left))
    most = float(np.min(reference[num_rounds:] - entered))
    if world.is_root:
        return ClockOffset(0.0, 0.0)
    return ClockOffset((least + most) / 2, max(0.0, (most - least) / 2))
