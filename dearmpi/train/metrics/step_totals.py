"""Step totals: sums over ranks about each step that arrive while the next one computes.

All ranks must know loss, failures and signals at the same step, without waiting. So each step posts
one small all-reduce, and reads the one of the step before. A long step reads its own: the wait is
short beside it, and a request to stop may not have time for another step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dearmpi.comm.messages.values import HostBuffer
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World

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
        """Send this rank's loss of ``step`` (its weighted sum), whether it shall stop, how many
        stages of checkpoints it has finished, how long it took, and what its clock shows.
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
