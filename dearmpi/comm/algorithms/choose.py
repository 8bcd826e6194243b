"""Which reduce-scatter is fastest here, found out by trying."""

from __future__ import annotations

from functools import partial
from typing import get_args

from dearmpi.comm.algorithms.halves import Halves
from dearmpi.comm.algorithms.trial import run_all
from dearmpi.comm.api.collectives import Buffer
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
        halves = Halves(algorithm, wire_dtype)
        if not halves.can_reduce or (algorithm == "native" and not can_be_native):
            continue
        start = partial(halves.start_reduce, buffer)
        best[algorithm] = min(run_all(world, channel, [start]) for _ in range(_NUM_TRIALS))
    channel.close()
    slowest = world.all_reduce(list(best.values()), "max")
    return min(zip(slowest, best, strict=True))[1]
