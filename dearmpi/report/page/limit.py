"""Limit: what a step consists of, and what changes would make of it. What keeps a run from being
faster, in one sentence with what to try.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from dearmpi.report.analyse.figures import Figures, RankFigures
from dearmpi.report.analyse.replica import Replica
from dearmpi.report.draw.units import count_text, share_text, time_text
from dearmpi.report.read.pace import WORTH

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


UNMEASURED = "Nothing was measured: neither metrics nor traces tell of a step."
"""What is said in place of a verdict where there is none."""


class Limit(Enum):
    """What limits a run."""

    COMPUTE = "compute"
    NETWORK = "network"
    CORES = "cores"
    FIRST_BUCKET = "first bucket"
    STRAGGLER = "straggler"
    UNEVEN = "uneven ranks"
    DATA = "data"
    BETWEEN_STEPS = "between steps"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The limit, in a sentence. lost_s: what a step would gain at most without it."""

    limit: Limit
    sentence: str
    lost_s: float


@dataclass(frozen=True, slots=True)
class _Case:
    """What a sentence is made of. lost_s: the part of a step that it is about."""

    figures: Figures
    parts: StepParts
    gains: Mapping[Change, StepGain]
    lost_s: float

    def of_step(self) -> str:
        """``0.61 s of 1.71 s per step (36 %)``."""
        whole_s = self.parts.whole_s
        share = share_text(self.lost_s / whole_s)
        return f"{time_text(self.lost_s)} of {time_text(whole_s)} per step ({share})"

    def gain(self, change: Change) -> str:
        """``which would take 1.10 s then`` with a comma before it; empty where nothing tells."""
        if change not in self.gains:
            return ""
        gain = self.gains[change]
        about = "at best" if gain.at_best else "about"
        return f", with which a step would take {about} {time_text(gain.step_s)}"


def judge(figures: Figures, gains: Sequence[StepGain] = ()) -> Verdict:
    """Name the greatest part of a step beside its computation, or computation itself.

    Late ranks are named where they are the same all the time. gains: what changes would give, which
    the sentence says beside the change.
    """
    parts = part_step(figures)
    lost = {
        _network_limit(figures): parts.network_s,
        _late_limit(figures, parts): parts.late_s,
        Limit.BETWEEN_STEPS: parts.other_s,
    }
    if parts.data_s >= lost.get(Limit.DATA, 0.0):
        lost[Limit.DATA] = parts.data_s
    limit = max(lost, key=lambda one: lost[one])
    if lost[limit] < WORTH * parts.whole_s:
        limit = Limit.COMPUTE
    lost_s = parts.network_s if limit is Limit.COMPUTE else lost[limit]
    case = _Case(figures, parts, {gain.change: gain for gain in gains}, lost_s)
    return Verdict(limit, _SENTENCES[limit](case), 0.0 if limit is Limit.COMPUTE else lost_s)


def _network_limit(figures: Figures) -> Limit:
    if figures.one_host:
        return Limit.CORES
    return Limit.FIRST_BUCKET if figures.first_s > figures.network_s / 2 else Limit.NETWORK


def _late_limit(figures: Figures, parts: StepParts) -> Limit:
    """Why ranks are late: one is slow, one loads its data longer, or each in turn."""
    if figures.stragglers is not None:
        return Limit.STRAGGLER
    loads_longer_s = figures.data_s - parts.data_s
    return Limit.DATA if loads_longer_s > parts.late_s / 2 else Limit.UNEVEN


def _say_compute(case: _Case) -> str:
    figures = case.figures
    hidden = figures.hidden_share
    waits, faster = "the network", "; a faster network would hardly help"
    if figures.one_host:
        waits, faster = "communication", ""
    if hidden is None:
        said = "nothing is communicated"
    else:
        said = (
            f"{case.of_step()} is spent waiting for {waits}, and "
            f"{share_text(hidden)} of the communication is hidden"
        )
    return (
        f"Computation limits this run: {said}. To go faster try more ranks, --precision bf16, or "
        f"a faster model{faster}."
    )


def _say_cores(case: _Case) -> str:
    figures = case.figures
    ranks = len(figures.ranks)
    fewer = "ranks or --threads" if figures.num_threads != 1 else "ranks"
    crowd = ""
    if figures.num_cores and figures.num_threads:
        crowd = (
            f" ({ranks} ranks compute with {count_text(figures.num_threads, 'thread')} each and "
            f"have one more for communication; rank 0 may use "
            f"{count_text(figures.num_cores, 'core')})"
        )
    return (
        f"Communication within one host limits this run: {case.of_step()} is spent waiting for it. "
        f"Look at cores first{crowd}: try fewer {fewer}, so that each has cores of its "
        "own; then a larger --batch-size, which communicates less often."
    )


def _say_network(case: _Case) -> str:
    figures = case.figures
    faster = f"or a link twice as fast{case.gain(Change.FASTER_LINK)}"
    cure = f"try a larger --batch-size, which communicates less often, {faster}"
    if figures.schedule and figures.schedule != "dear" and not figures.planned:
        cure = (
            f"try --schedule dear (this was {figures.schedule}), then a larger --batch-size, "
            f"{faster}"
        )
    hint = ""
    if not figures.traced:
        hint = (
            "; record a --trace of two iterations or more to see which buckets are waited for, and "
            "whether ranks that share cores wait for each other rather than for the network"
        )
    flight = time_text(figures.communication_s)
    waited = f"communication, which takes {flight} in all"
    if case.lost_s > figures.communication_s:  # main threads wait for more than buckets
        waited = f"gradients, parameters and totals; the first two are under way for {flight}"
    return (
        f"The network limits this run: {case.of_step()} is spent waiting for {waited}; "
        f"{cure}{hint}."
    )


def _say_first_bucket(case: _Case) -> str:
    figures = case.figures
    cure = "try a smaller --bucket-cap-mb, so that less is left for the end"
    if figures.planned:
        cure = "the plan has weighed that against what more buckets cost"
    return (
        f"The first bucket limits this run: {case.of_step()} is spent waiting for "
        f"communication, and of an iteration in the trace {time_text(figures.first_s)} for the "
        "reduce-scatter, update and all-gather of the first layers between two iterations, which "
        f"nothing can hide; {cure}."
    )


def _say_straggler(case: _Case) -> str:
    stragglers = case.figures.stragglers
    assert stragglers is not None
    verb, compute, wait = "limit", "they compute", "these wait for them"
    if len(stragglers.places) == 1:
        verb, compute, wait = "limits", "it computes", "they wait for it"
    cured = ""
    if Change.EVEN_RANKS in case.gains:
        even_s = case.gains[Change.EVEN_RANKS].step_s
        cured = f" Without late ranks a step would take about {time_text(even_s)}."
    return (
        f"{case.figures.name(stragglers)} {verb} this run: {compute} for "
        f"{time_text(stragglers.busy_s)} per step, the others for "
        f"{time_text(stragglers.typical_s)}, and {wait} for {case.of_step()}; look for other "
        f"work, fewer cores or a slower clock there, or leave that host out.{cured}"
    )


def _say_uneven(case: _Case) -> str:
    fewer = "--threads or ranks" if case.figures.num_threads != 1 else "ranks"
    return (
        f"Ranks that are late in turn limit this run: {case.of_step()} is spent waiting "
        f"while another rank still computes; try fewer {fewer} per host, so that each has cores "
        "of its own, and look for other work on the hosts."
    )


def _say_data(case: _Case) -> str:
    figures = case.figures
    slowest = figures.slowest_loader
    where = ""
    cure = (
        "try more --workers, which load ahead, or prepare samples beforehand, or decode less"
        f"{case.gain(Change.DATA_AHEAD)}"
    )
    if len(figures.ranks) > 1 and case.parts.data_s < slowest.data_s / 2:
        where = f" on {slowest.label}, and {time_text(case.parts.data_s)} on the others"
        cure = "look at that host's way to the data"
    loads = replace(case, lost_s=slowest.data_s if where else case.lost_s)
    return f"Loading data limits this run: {loads.of_step()} goes into it{where}; {cure}."


def _say_between_steps(case: _Case) -> str:
    return (
        f"What is done between steps limits this run: {case.of_step()} goes into checkpoints, "
        "evaluations and logs; "
        "try a larger --checkpoint-interval, --eval-interval or --log-interval, or a faster disk."
    )


_SENTENCES: Mapping[Limit, Callable[[_Case], str]] = {
    Limit.COMPUTE: _say_compute,
    Limit.NETWORK: _say_network,
    Limit.CORES: _say_cores,
    Limit.FIRST_BUCKET: _say_first_bucket,
    Limit.STRAGGLER: _say_straggler,
    Limit.UNEVEN: _say_uneven,
    Limit.DATA: _say_data,
    Limit.BETWEEN_STEPS: _say_between_steps,
}
