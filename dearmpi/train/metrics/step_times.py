"""Step times: what this rank measures, what all ranks share, and what metrics.jsonl keeps of it.

Step totals are sums over ranks about each step that arrive while the next one computes. All ranks
must know loss, failures and signals at the same step, without waiting. So each step posts one small
all-reduce, and reads the one of the step before. A long step reads its own: the wait is short
beside it, and a request to stop may not have time for another step.
"""

from __future__ import annotations

import math
import time
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
    """Those that are nearer to the busiest than to the median, as all ranks of a slow host are. In
    any case the first few; in order of their numbers.
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


LONG_STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class StepTotal:
    """One step, seen by all ranks alike.

    step: number of the step, from 1.
    loss: mean over the step's samples; NaN if it was not finite on some rank.
    num_bad: ranks whose loss was not finite.
    bad_sum: their numbers, added up: where there is one, that rank.
    num_stops: ranks that received a request to stop.
    num_saved: stages of checkpoints that the ranks have finished, added up (``Saver.num_done``).
    step_s: what it took, the mean over ranks, with waits for totals.
    clock_s: rank 0's seconds since its first step began, by which all ranks go.
    """

    step: int
    loss: float
    num_bad: int
    bad_sum: int
    num_stops: int
    num_saved: int
    step_s: float = 0.0
    clock_s: float = 0.0

    def describe_bad(self, hosts: Sequence[str]) -> str:
        """How many ranks had such a loss, and which one if it is one. hosts: by rank."""
        name = f" (rank {self.bad_sum} on {hosts[self.bad_sum]})" if self.num_bad == 1 else ""
        noun = "rank" if len(hosts) == 1 else "ranks"
        return f"{self.num_bad} of {len(hosts)} {noun}{name}"


@dataclass(slots=True)
class _Entry:
    step: int
    buffer: HostBuffer
    arrived: bool = False


@dataclass(slots=True)
class StepTotals:
    """Posts what each step gave on this rank, and reads what it gave on all (collective)."""

    world: World
    _channel: Channel = field(init=False, repr=False)
    _entries: list[_Entry] = field(default_factory=list, init=False)
    _step_s: float = field(default=math.inf, init=False)  # the first step may be a long one
    _waited_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._channel = self.world.open_channel("step totals", window=1)

    @property
    def delay(self) -> int:
        """How many steps later to read: 1, or 0 where steps are long; the same on all ranks."""
        return 0 if self._step_s > LONG_STEP_S else 1

    def post(
        self,
        step: int,
        *,
        loss: float,
        stop: bool,
        num_saved: int = 0,
        step_s: float = 0.0,
        clock_s: float = 0.0,
    ) -> None:
        """Send this rank's loss of ``step`` (its weighted sum), duration and clock; also whether it
        shall stop, and how many stages of checkpoints it has finished.
        """
        bad = not math.isfinite(loss)
        # Without its waits here a fast rank's steps would look short as soon as they are long.
        # Whole numbers, whose sum is the same on all ranks, in whatever order MPI adds them.
        micros, self._waited_s = round((step_s + self._waited_s) * 1e6), 0.0
        clock = round(clock_s * 1e6) if self.world.is_root else 0
        values = [0.0 if bad else loss, bad, bad * self.world.rank, stop, num_saved, micros, clock]
        entry = _Entry(step, HostBuffer(np.array(values, dtype=np.float64)))
        self._entries.append(entry)

        def finish() -> None:
            entry.arrived = True

        self._channel.submit(
            f"totals of step {step}", lambda c: c.start_all_reduce(entry.buffer, "sum"), finish
        )

    def read(self, *, pending: int = 0) -> list[StepTotal]:
        """The totals of all steps but the last ``pending``, each of them once, in order."""
        count = max(0, len(self._entries) - pending)
        ready, self._entries = self._entries[:count], self._entries[count:]
        if ready:
            begin_s = time.perf_counter()
            self.world.progress.wait_until(
                lambda: all(entry.arrived for entry in ready),
                what=f"the totals of step {ready[-1].step}",
            )
            self._waited_s += time.perf_counter() - begin_s
        totals = [self._total(entry) for entry in ready]
        self._step_s = totals[-1].step_s if totals else self._step_s
        return totals

    def close(self) -> None:
        """Give the channel back."""
        self._channel.close()

    def _total(self, entry: _Entry) -> StepTotal:
        loss, *counts = entry.buffer.array.tolist()
        num_bad, bad_sum, num_stops, num_saved, micros, clock = (int(count) for count in counts)
        mean = math.nan if num_bad else loss / self.world.size
        step_s = micros / 1e6 / self.world.size
        clock_s = clock / 1e6
        return StepTotal(entry.step, mean, num_bad, bad_sum, num_stops, num_saved, step_s, clock_s)
