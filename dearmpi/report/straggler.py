"""Straggler: a rank for which the others wait, by one rule for the console and the report."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

# A part of less than this share of a step is not worth anybody's time.
WORTH = 0.10
_WAITED_SHARE = 0.5  # of the excess: where the others do not wait for it, it harms nobody
STRETCH_STEPS = 10  # over fewer steps any rank may be late: noise averages out
STEADY = 5  # stretches in a row: ranks that share cores are late in turn, and each for a while


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank for which the others wait, by its place. busy_s and typical_s: what it and the others'
    median rank are busy per step; waited_s: what the others wait longer than it, by median.
    """

    place: int
    busy_s: float
    typical_s: float
    waited_s: float

    @property
    def excess_s(self) -> float:
        """What a step would gain at most without it."""
        return self.busy_s - self.typical_s


def find_straggler(
    busy_s: Sequence[float], wait_s: Sequence[float], *, step_s: float
) -> Straggler | None:
    """The rank that is busy longest, if that costs ``WORTH`` of a step and the others wait for it.

    busy_s, wait_s: of each rank, in seconds per step.
    """
    if len(busy_s) < 2:
        return None
    place = max(range(len(busy_s)), key=lambda rank: busy_s[rank])
    others = [rank for rank in range(len(busy_s)) if rank != place]
    found = Straggler(
        place,
        busy_s[place],
        median(busy_s[rank] for rank in others),
        median(wait_s[rank] for rank in others) - wait_s[place],
    )
    matters = found.excess_s >= WORTH * step_s and step_s > 0
    return found if matters and found.waited_s >= _WAITED_SHARE * found.excess_s else None


@dataclass(slots=True)
class SlowRanks:
    """Which rank was slow in each stretch of a run, from the times of all ranks.

    A stretch is as many rows of metrics as make up ``STRETCH_STEPS``. Of those before the last
    ``STEADY`` only counts are kept, since a run may go on for weeks.
    """

    last_step: int
    _num_steps: int = 0
    _busy_s: list[float] = field(default_factory=list)
    _wait_s: list[float] = field(default_factory=list)
    _num_stretches: Counter[int | None] = field(default_factory=Counter)  # by the slow rank's place
    _last_places: deque[int | None] = field(default_factory=lambda: deque(maxlen=STEADY))
    _latest: Straggler | None = None

    def add(self, step: int, busy_s: Sequence[float], wait_s: Sequence[float]) -> None:
        """Count the steps up to ``step``; the seconds are each rank's means per step."""
        count, self.last_step = step - self.last_step, step
        if self._num_steps == 0:
            self._busy_s, self._wait_s = [0.0] * len(busy_s), [0.0] * len(wait_s)
        self._num_steps += count
        for sums, means in ((self._busy_s, busy_s), (self._wait_s, wait_s)):
            sums[:] = [total + count * mean for total, mean in zip(sums, means, strict=True)]
        if self._num_steps >= STRETCH_STEPS:
            self._end_stretch()

    def _end_stretch(self) -> None:
        busy_s, wait_s = (
            [total / self._num_steps for total in sums] for sums in (self._busy_s, self._wait_s)
        )
        step_s = max(map(sum, zip(busy_s, wait_s, strict=True)), default=0.0)
        self._latest = find_straggler(busy_s, wait_s, step_s=step_s)
        place = None if self._latest is None else self._latest.place
        self._num_stretches[place] += 1
        self._last_places.append(place)
        self._num_steps = 0

    @property
    def steady(self) -> Straggler | None:
        """In the latest stretch, the rank that was slow in each of the last ``STEADY``."""
        places = self._last_places
        return self._latest if len(places) == STEADY and len(set(places)) == 1 else None

    def has_recovered(self, place: int) -> bool:
        """Whether the rank at ``place`` was slow in none of the last ``STEADY`` stretches."""
        return place not in self._last_places

    def share(self, place: int) -> float:
        """The share of stretches in which the rank at ``place`` was slow; 1 where there is none."""
        if not self._num_stretches:
            return 1.0
        return self._num_stretches[place] / self._num_stretches.total()
