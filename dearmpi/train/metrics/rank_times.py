"""Rank times: what every rank spends on a step, known to all."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, fields

import numpy as np

from dearmpi.comm.messages.host import HostBuffer
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One rank's means per step, in seconds. wait_s: of step_s, it waited for other ranks.
    data_s: it loaded data.
    """

    step_s: float
    wait_s: float
    data_s: float = 0.0

    @property
    def own_s(self) -> float:
        """What the rank itself was busy."""
        return max(0.0, self.step_s - self.wait_s)


_NUM_TIMES = len(fields(RankTimes))


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
        table = np.zeros((self.world.size, _NUM_TIMES))
        table[self.world.rank] = astuple(own)
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
        table = shared.buffer.array.reshape(self.world.size, _NUM_TIMES)
        return tuple(RankTimes(*map(float, times)) for times in table)

    def close(self) -> None:
        """Give the channel back (collective)."""
        self._channel.close()
