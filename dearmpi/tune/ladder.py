"""Ladder: what an operation takes at rising sizes, as far up as the time allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dearmpi.comm.world import World
from dearmpi.cuts import even_cuts
from dearmpi.tune.calibration import SizeTimes

_NUM_REPEATS = 3  # fewer where the time does not allow as many
WINDOWS = (1, 2)


@dataclass(frozen=True, slots=True)
class Rung:
    """Measured together: ``length`` operations of ``nbytes``, one after the other.

    Several, as in training: what a network lets through at once after a pause shall not count, nor
    what ranks that begin and end together lose at both ends.
    """

    nbytes: int
    length: int


_FEWEST_RUNGS = 2  # that a line can be drawn through
LADDER = (Rung(1 << 16, 8), Rung(1 << 19, 4), Rung(1 << 22, 4), Rung(1 << 25, 4))

Run = Callable[[int, int], float]
"""Runs so many of the prepared operations, with so many in flight; the seconds on this rank."""

Prepare = Callable[[int, int], Run]
"""Makes ready operations on buffers of so many fp32 elements each, and so many of them."""


def climb(
    world: World,
    operations: Sequence[Prepare],
    *,
    budget_s: float,
    most_bytes: int = LADDER[-1].nbytes,
) -> list[tuple[SizeTimes, ...]]:
    """The times of each of ``operations`` at several sizes, whole shards each (collective).

    Operations follow one another, with one and with two of them in flight; the least of the
    slowest rank's times counts, since whatever else goes on makes them longer. Two sizes are
    measured even if that takes longer than ``budget_s``, and more of the ladder as far as the time
    and ``most_bytes`` allow: the last as large as they do.
    """
    found: list[list[SizeTimes]] = [[] for _ in operations]
    begin = time.perf_counter()
    for number, rung in enumerate(LADDER):
        left_s = budget_s - world.all_reduce([time.perf_counter() - begin], "max")[0]
        nbytes = rung.nbytes
        if number >= _FEWEST_RUNGS:
            # What is compared is the same on all ranks, so all of them stop here or none.
            nbytes = min(nbytes, most_bytes, _affordable_bytes(found, rung.length, left_s))
            if nbytes < 2 * found[0][-1].nbytes:
                break
        for prepare, times in zip(operations, found, strict=True):
            share_s = left_s / len(operations)
            times.append(_measure(world, prepare, Rung(nbytes, rung.length), budget_s=share_s))
    return [tuple(times) for times in found]


def _affordable_bytes(found: Sequence[Sequence[SizeTimes]], length: int, left_s: float) -> int:
    """How large operations may be to be measured once in ``left_s``, as the last two sizes tell."""
    one, other = ([times[place] for times in found] for place in (-2, -1))
    nbytes, alone_s = other[0].nbytes, sum(times.alone_s for times in other)
    slope = (alone_s - sum(times.alone_s for times in one)) / (nbytes - one[0].nbytes)
    num_operations = 1 + len(WINDOWS) * length
    most_s = left_s / num_operations - alone_s
    if most_s <= 0:
        return 0
    return nbytes + int(most_s / max(slope, 1e-12))  # 1 TB/s: faster than what was ever measured


def _measure(world: World, prepare: Prepare, rung: Rung, *, budget_s: float) -> SizeTimes:
    """Times on ``rung``, its size rounded to whole shards (collective)."""
    count = even_cuts(-(-rung.nbytes // 4), world.size).total
    run = prepare(count, rung.length)
    first_s = world.all_reduce([run(1, 1)], "max")[0]
    affordable = budget_s / (len(WINDOWS) * rung.length * first_s)
    repeats = int(min(_NUM_REPEATS, max(1, affordable)))
    each_s = [
        min(world.all_reduce([run(rung.length, window) for _ in range(repeats)], "max"))
        / rung.length
        for window in WINDOWS
    ]
    return SizeTimes(4 * count, each_s[0], 2 * each_s[1])
