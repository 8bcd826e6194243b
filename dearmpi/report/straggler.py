"""Straggler: a rank for which the others wait, by one rule for the console and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

# A part of less than this share of a step is not worth anybody's time.
WORTH = 0.10
_WAITED_SHARE = 0.5  # of the excess: where the others do not wait for it, it harms nobody


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
