"""Rank times: what every rank spends on a step, known to all, and who holds the others up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from dearmpi.comm.host import HostBuffer
from dearmpi.comm.world import Channel, World

SLOW_FACTOR = 1.2  # of the other ranks' median; below it are the differences of any two machines
_WAITED_SHARE = 0.5  # of the excess: where the others do not wait for it, it harms nobody


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One rank's means per step, in seconds. wait_s: of step_s, it waited for other ranks."""

    step_s: float
    wait_s: float

    @property
    def own_s(self) -> float:
        """What the rank itself was busy."""
        return max(0.0, self.step_s - self.wait_s)


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank for which the others wait. own_s and typical_s: what it and the others' median rank
    are busy per step; waited_s: what the others wait, by median.
    """

    rank: int
    own_s: float
    typical_s: float
    waited_s: float


def find_straggler(ranks: Sequence[RankTimes]) -> Straggler | None:
    """The slowest rank, if it is well behind the others and they wait for it."""
    if len(ranks) < 2:
        return None
    slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].own_s)
    others = [times for rank, times in enumerate(ranks) if rank != slowest]
    own_s, typical_s = ranks[slowest].own_s, median(times.own_s for times in others)
    waited_s = median(times.wait_s for times in others) - ranks[slowest].wait_s
    if own_s <= SLOW_FACTOR * typical_s or waited_s < _WAITED_SHARE * (own_s - typical_s):
        return None
    return Straggler(slowest, own_s, typical_s, waited_s)


@dataclass(slots=True)
class _Shared:
    buffer: HostBuffer
    arrived: bool = False

    def finish(self) -> None:
        self.arrived = True


@dataclass(slots=True)
class TimesExchange:
    """Lets all ranks know each other's times, now and then; nobody waits before ``read``."""

    world: World
    _channel: Channel = field(init=False, repr=False)
    _shared: _Shared | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._channel = self.world.open_channel("rank times", window=1)

    def share(self, own: RankTimes) -> None:
        """Send this rank's times (collective)."""
        table = np.zeros((self.world.size, 2))
        table[self.world.rank] = own.step_s, own.wait_s
        shared = self._shared = _Shared(HostBuffer(table.reshape(-1)))
        self._channel.submit(
            "the ranks' times", lambda c: c.start_all_gather(shared.buffer), shared.finish
        )

    def read(self) -> tuple[RankTimes, ...]:
        """What was shared last, by rank, once; nothing if nothing was."""
        shared, self._shared = self._shared, None
        if shared is None:
            return ()
        self.world.progress.wait_until(lambda: shared.arrived, what="the ranks' times")
        table = shared.buffer.array.reshape(self.world.size, 2)
        return tuple(RankTimes(float(step_s), float(wait_s)) for step_s, wait_s in table)

    def close(self) -> None:
        """Give the channel back (collective)."""
        self._channel.close()
