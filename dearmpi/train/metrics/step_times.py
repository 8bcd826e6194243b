"""Step times: what this rank measures, what all ranks share, and what metrics.jsonl keeps of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from statistics import median
from typing import Any

import numpy as np

from dearmpi.comm.messages.values import HostBuffer
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
    """Shares the times of all ranks now and then, without waiting before ``read``."""

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


MOST_LISTED = 64
LEAST_NAMED = 8
LISTS = tuple(f"rank_{f.name}" for f in fields(RankTimes))
SUMMARY = "rank_times"


def rank_columns(ranks: Sequence[RankTimes]) -> dict[str, Any]:
    """By name; nothing where nothing is known of ranks."""
    if not ranks:
        return {}
    by_kind = list(zip(*map(_rounded, ranks), strict=True))
    if len(ranks) <= MOST_LISTED:
        return dict(zip(LISTS, by_kind, strict=True))
    summary: dict[str, Any] = {"num_ranks": len(ranks)}
    for column, values in zip(fields(RankTimes), by_kind, strict=True):
        typical = round(median(values), 6)
        summary[column.name] = {"min": min(values), "median": typical, "max": max(values)}
    return {SUMMARY: {**summary, "busiest": {r: _rounded(ranks[r]) for r in _busiest(ranks)}}}


def _busiest(ranks: Sequence[RankTimes]) -> list[int]:
    """Those that are nearer to the busiest than to the median, as all ranks of a slow host are,
    and in any case the first few; in order of their numbers.
    """
    own_s = [times.own_s for times in ranks]
    midway_s = (median(own_s) + max(own_s)) / 2
    ordered = sorted(range(len(ranks)), key=lambda rank: own_s[rank], reverse=True)
    named = ordered[:LEAST_NAMED] + [r for r in ordered[LEAST_NAMED:] if own_s[r] > midway_s]
    return sorted(named)


def _rounded(times: RankTimes) -> list[float]:
    return [round(seconds, 6) for seconds in astuple(times)]


@dataclass(slots=True)
class Sums:
    """What some steps took together; seconds are this rank's.

    num_steps: so many were taken.
    num_samples: all ranks together trained on so many.
    seconds: from the start of each step to its end, and waits outside of steps.
    exposed_s: feed-forward, backprop or the step waited for gradients or parameters.
    communication_s: gradients or parameters were on the network, waited for or hidden.
    waited_s: it waited for gradients, parameters or totals of other ranks.
    data_s: it loaded data.
    """

    num_steps: int = 0
    num_samples: int = 0
    seconds: float = 0.0
    exposed_s: float = 0.0
    communication_s: float = 0.0
    waited_s: float = 0.0
    data_s: float = 0.0

    def add(self, other: Sums) -> None:
        """Add the sums of ``other`` to these."""
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))

    @property
    def per_step(self) -> RankTimes:
        """This rank's means."""
        num_steps = max(1, self.num_steps)
        return RankTimes(
            self.seconds / num_steps, self.waited_s / num_steps, self.data_s / num_steps
        )

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks per second; 0 before the first step."""
        return self.num_samples / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class Meter:
    """Adds up steps.

    interval: since the last ``lap``. steady: since the start, without the first step, which pays
    for allocations and for connections made on first use. seconds: since the start, with it.
    """

    interval: Sums = field(default_factory=Sums)
    steady: Sums = field(default_factory=Sums)
    seconds: float = 0.0
    _started: bool = False
    _reported_wait_s: float = 0.0
    _late_wait_s: float = 0.0

    def add(self, step: Sums) -> None:
        """Count one step."""
        self.interval.add(step)
        self.seconds += step.seconds
        if self._started:
            self.steady.add(step)
        self._started = True

    def wait(self, seconds: float) -> None:
        """Count time spent waiting for the last step's communication outside of steps."""
        self.interval.seconds += seconds
        self.seconds += seconds
        self.interval.waited_s += seconds
        if self.steady.num_steps:
            self.steady.seconds += seconds

    def means(self) -> RankTimes:
        """This rank's means since the last lap, for the other ranks. Waits between this call and
        the lap are reported with the next means.
        """
        num_steps = max(1, self.interval.num_steps)
        late_s, self._reported_wait_s = self._late_wait_s / num_steps, self.interval.waited_s
        own = self.interval.per_step
        return replace(own, step_s=own.step_s + late_s, wait_s=own.wait_s + late_s)

    def lap(self) -> Sums:
        """The sums since the last lap, which begin anew."""
        sums, self.interval = self.interval, Sums()
        self._late_wait_s, self._reported_wait_s = sums.waited_s - self._reported_wait_s, 0.0
        return sums
