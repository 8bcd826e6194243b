"""Limit: what keeps a run from being faster, in one sentence with what to try."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from statistics import median

from dearmpi.report.analyse.figures import Figures
from dearmpi.report.draw.units import share_text, time_text
from dearmpi.report.read.pace import WORTH

UNMEASURED = "Nothing was measured: neither metrics nor traces tell of a step."
"""What is said in place of a verdict where there is none."""


class Limit(Enum):
    """What limits a run."""

    COMPUTE = "compute"
    NETWORK = "network"
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


def judge(figures: Figures) -> Verdict:
    """Name what costs most of a step beyond its computation, or computation itself.

    A step of the slowest rank consists of its computation, its data and its waits. While all ranks
    wait, they wait for the network; else for a rank that is late this time. What the slowest rank
    computes longer than the others is what they wait for it. What is done between steps comes on
    top.
    """
    # The first bucket and the network are one kind of loss: only together they compete.
    is_first = figures.first_s > figures.network_s / 2
    stragglers = figures.stragglers
    kinds = {
        Limit.FIRST_BUCKET if is_first else Limit.NETWORK: figures.network_s,
        Limit.STRAGGLER: 0.0 if stragglers is None else stragglers.excess_s,
        Limit.UNEVEN: figures.uneven_s,
        Limit.DATA: figures.data_s,
        Limit.BETWEEN_STEPS: figures.between_s,
    }
    limit = max(kinds, key=lambda one: kinds[one])
    if kinds[limit] < WORTH * figures.step_s:
        limit = Limit.COMPUTE
    lost_s = kinds.get(limit, 0.0)
    return Verdict(limit, _SENTENCES[limit](figures, lost_s), lost_s)


def _of_step(figures: Figures, seconds: float) -> str:
    """``0.61 s of 1.71 s per step (36 %)``."""
    share = share_text(seconds / figures.step_s)
    return f"{time_text(seconds)} of {time_text(figures.step_s)} per step ({share})"


def _say_compute(figures: Figures, _lost_s: float) -> str:
    hidden = figures.hidden_share
    if hidden is None:
        said = "nothing is communicated"
    else:
        said = (
            f"{_of_step(figures, figures.network_s)} is spent waiting for the network, and "
            f"{share_text(hidden)} of the communication is hidden"
        )
    return (
        f"Computation limits this run: {said}. To go faster try more ranks, --precision bf16, or "
        "a faster model; a faster network would hardly help."
    )


def _say_network(figures: Figures, lost_s: float) -> str:
    cure = "try a larger --batch-size, which communicates less often, or a faster link"
    if figures.schedule and figures.schedule != "dear" and not figures.planned:
        cure = f"try --schedule dear (this was {figures.schedule}), then a larger --batch-size"
    hint = ""
    if not figures.traced:
        hint = (
            "; record a --trace of two iterations or more to see which buckets are waited for, and "
            "whether ranks that share cores wait for each other rather than for the network"
        )
    flight = time_text(figures.communication_s)
    waited = f"communication, which takes {flight} in all"
    if lost_s > figures.communication_s:  # main threads wait for more than buckets
        waited = f"gradients, parameters and totals; the first two are under way for {flight}"
    return (
        f"The network limits this run: {_of_step(figures, lost_s)} is spent waiting for {waited}; "
        f"{cure}{hint}."
    )


def _say_first_bucket(figures: Figures, lost_s: float) -> str:
    cure = "try a smaller --bucket-cap-mb, so that less is left for the end"
    if figures.planned:
        cure = "the plan has weighed that against what more buckets cost"
    return (
        f"The first bucket limits this run: {_of_step(figures, lost_s)} is spent waiting for "
        f"communication, and of an iteration in the trace {time_text(figures.first_s)} for the "
        "reduce-scatter, update and all-gather of the first layers between two iterations, which "
        f"nothing can hide; {cure}."
    )


def _say_straggler(figures: Figures, _lost_s: float) -> str:
    stragglers = figures.stragglers
    assert stragglers is not None
    verb, compute, wait = "limit", "they compute", "these wait for them"
    if len(stragglers.places) == 1:
        verb, compute, wait = "limits", "it computes", "they wait for it"
    return (
        f"{figures.name(stragglers)} {verb} this run: {compute} for {time_text(stragglers.busy_s)} "
        f"per step, the others for {time_text(stragglers.typical_s)}, and {wait}; look for other "
        "work, fewer cores or a slower clock there, or leave that host out."
    )


def _say_uneven(figures: Figures, lost_s: float) -> str:
    return (
        f"Ranks that are late in turn limit this run: {_of_step(figures, lost_s)} is spent waiting "
        "while another rank still computes; try fewer --threads or ranks per host, so that each "
        "has cores of its own, and look for other work on the hosts."
    )


def _say_data(figures: Figures, lost_s: float) -> str:
    slowest = figures.slowest_loader
    others_s = [times.data_s for times in figures.ranks if times is not slowest]
    where = ""
    cure = "try more --workers, which load ahead, or prepare samples beforehand, or decode less"
    if others_s and median(others_s) < lost_s / 2:
        where = f" on {slowest.label}, and {time_text(median(others_s))} on the others"
        cure = "look at that host's way to the data"
    return f"Loading data limits this run: {_of_step(figures, lost_s)} goes into it{where}; {cure}."


def _say_between_steps(figures: Figures, lost_s: float) -> str:
    whole_s = figures.step_s + lost_s
    return (
        f"What is done between steps limits this run: {time_text(lost_s)} of {time_text(whole_s)} "
        f"per step ({share_text(lost_s / whole_s)}) goes into checkpoints, evaluations and logs; "
        "try a larger --checkpoint-interval, --eval-interval or --log-interval, or a faster disk."
    )


_SENTENCES = {
    Limit.COMPUTE: _say_compute,
    Limit.NETWORK: _say_network,
    Limit.FIRST_BUCKET: _say_first_bucket,
    Limit.STRAGGLER: _say_straggler,
    Limit.UNEVEN: _say_uneven,
    Limit.DATA: _say_data,
    Limit.BETWEEN_STEPS: _say_between_steps,
}
