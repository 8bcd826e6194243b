"""Step parts: what a step consists of, and what a change would make of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dearmpi.report.analyse.figures import Figures, RankFigures
from dearmpi.report.analyse.replica import Replica

SEEN = 0.005
"""The share of a step from which on a part is wider than a line."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """A step of the typical rank, in seconds; the parts add up to ``whole_s``.

    compute_s: it computes, or does what is not measured by itself. network_s: it waits while all
    ranks wait. late_s: it waits for ranks that still compute. data_s: it loads data. other_s: what
    is done between two steps, such as to save, and what a step of the slowest rank takes longer.
    """

    compute_s: float
    network_s: float
    late_s: float
    data_s: float
    other_s: float

    @property
    def whole_s(self) -> float:
        return self.compute_s + self.network_s + self.late_s + self.data_s + self.other_s


def typical_rank(figures: Figures) -> RankFigures:
    """The rank of median work, of two the one with less: stragglers are fewer than the others."""
    ranks = sorted(figures.ranks, key=lambda times: times.compute_s + times.data_s)
    return ranks[(len(ranks) - 1) // 2]


def part_step(figures: Figures) -> StepParts:
    """The parts of a step, and of what is done until the next one."""
    rank = typical_rank(figures)
    wait_s = min(rank.wait_s, rank.step_s)
    network_s = min(figures.network_s, wait_s)
    data_s = min(rank.data_s, rank.step_s - wait_s)
    return StepParts(
        compute_s=rank.step_s - wait_s - data_s,
        network_s=network_s,
        late_s=wait_s - network_s,
        data_s=data_s,
        other_s=figures.between_s + figures.step_s - rank.step_s,
    )


class Change(Enum):
    """What could be different."""

    EVEN_RANKS = "no rank late"
    FASTER_LINK = "a link twice as fast"
    DATA_AHEAD = "data loaded ahead"


@dataclass(frozen=True, slots=True)
class StepGain:
    """step_s: what a step would take after ``change``. at_best: no less, and likely more."""

    change: Change
    step_s: float
    at_best: bool = False


def gains_of(figures: Figures, parts: StepParts, replica: Replica | None) -> tuple[StepGain, ...]:
    """What each change would give, without those that nobody would see.

    A faster link is simulated where the trace allows it; else it saves at most half of the
    communication. On one host there is no link.
    """
    found = []
    if parts.late_s > SEEN * parts.whole_s:
        found.append(StepGain(Change.EVEN_RANKS, parts.whole_s - parts.late_s))
    if parts.network_s > SEEN * parts.whole_s and not figures.one_host:
        saved_s = figures.communication_s / 2
        if replica is not None:
            saved_s = max(0.0, replica.timeline.iteration_s - replica.doubled.iteration_s)
        step_s = parts.whole_s - min(saved_s, parts.network_s)
        found.append(StepGain(Change.FASTER_LINK, step_s, at_best=replica is None))
    if parts.data_s > SEEN * parts.whole_s:
        found.append(StepGain(Change.DATA_AHEAD, parts.whole_s - parts.data_s))
    return tuple(found)
