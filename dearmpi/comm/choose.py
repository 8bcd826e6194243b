"""Which reduce-scatter is fastest here, found out by trying."""

from __future__ import annotations

from functools import partial
from typing import get_args

from dearmpi.comm.api import Buffer
from dearmpi.comm.trial import run_all, start_reduce
from dearmpi.comm.world import Carry, World, unchanged
from dearmpi.config import ReduceScatter, WireDtype

_NUM_TRIALS = 3


def fastest_reduce_scatter(
    world: World,
    buffer: Buffer,
    *,
    wire_dtype: WireDtype | None = None,
    can_be_native: bool = True,
    carry: Carry = unchanged,
) -> ReduceScatter:
    """The algorithm with the least time for ``buffer``, whose contents are lost (collective).

    wire_dtype: in what a wider buffer is to be sent, for which ``native`` is no choice.
    can_be_native: whether MPI can add all that is to be reduced so.
    carry: as in ``World.open_channel``.
    The slowest rank's best of a few trials counts, so that every rank chooses alike.
    """
    channel = world.open_channel("trial", window=1, carry=carry)
    best: dict[ReduceScatter, float] = {}
    for algorithm in get_args(ReduceScatter):
        if algorithm == "native" and (wire_dtype is not None or not can_be_native):
            continue  # MPI has no portable half-precision sum
        start = partial(start_reduce, buffer, algorithm, wire_dtype=wire_dtype)
        best[algorithm] = min(run_all(world, channel, [start]) for _ in range(_NUM_TRIALS))
    channel.close()
    slowest = world.all_reduce(list(best.values()), "max")
    return min(zip(slowest, best, strict=True))[1]
