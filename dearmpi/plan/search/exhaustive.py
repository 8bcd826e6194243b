"""Exhaustive: the best of all plans of a small model.

Over all contiguous cuts, orders of gathers, ties to reduce-scatters, and windows, with the
reduce-scatters in the order in which their buckets become ready.

A gather is posted when it is its turn, its bucket is updated, and the reduce-scatter that it is
tied to is complete. When it is its turn, all that the gathers before it were tied to is complete
already, and so are their own buckets. So a tie makes a difference only to a reduce-scatter that is
not among these, and of all others one stands for all: ties to the bucket's own. That leaves, with
four buckets, 360 of 6144 schedules, and none that is not equivalent to one of them. No window
beyond the number of buckets differs from it. Where gradients are gathered before a step that waits
for them, without eager updates, only the orders of serial and WFBP are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations

from dearmpi.plan.data.schedule import AllGather
from dearmpi.plan.search.draft import Draft, Drafts
from dearmpi.plan.search.problem import Cuts, Problem

MOST_TENSORS = 4
MOST_IN_FLIGHT = 4


def best_of_all(problem: Problem, *, enough_s: float) -> Draft:
    """The draft of least time; the first found that takes ``enough_s`` or less, if any does."""
    drafts = Drafts(problem)
    best: Draft | None = None
    for cuts in all_cuts(problem):
        for window in range(1, min(MOST_IN_FLIGHT, len(cuts)) + 1):
            for draft in chain(
                (drafts.tied(cuts, ties, window=window) for ties in all_ties(len(cuts))),
                drafts.plain(cuts, window=window),
            ):
                if best is None or draft.seconds < best.seconds:
                    best = draft
                if best.seconds <= enough_s:
                    return best
    assert best is not None
    return best


def all_cuts(problem: Problem) -> Iterator[Cuts]:
    """Every way to cut the tensors into contiguous buckets, fewest buckets first."""
    free = [number for number in range(len(problem.tensors)) if number not in problem.forced]
    for count in range(len(free) + 1):
        for chosen in combinations(free, count):
            yield tuple(sorted(problem.forced | set(chosen)))


def all_ties(num_buckets: int) -> Iterator[tuple[AllGather, ...]]:
    """Every order of gathers, with every tie that makes a difference."""
    return _continue((), frozenset(), frozenset(range(num_buckets)))


def _continue(
    before: tuple[AllGather, ...], complete: frozenset[int], rest: frozenset[int]
) -> Iterator[tuple[AllGather, ...]]:
    if not rest:
        yield before
    everything = frozenset(gather.bucket for gather in before) | rest
    for bucket in sorted(rest):
        known = complete | {bucket}
        for after in (bucket, *sorted(everything - known)):
            gather = AllGather(bucket, after)
            yield from _continue((*before, gather), known | {after}, rest - {bucket})
