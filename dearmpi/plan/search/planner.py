"""Planner: the plan of least simulated iteration time.

Small models get the best of all plans (``best_of_all``), larger ones the best plan found
(``improvement.improve``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations

from dearmpi.config import Gather
from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import BucketLayout, build_layout
from dearmpi.plan.data.plan import Plan, Prediction, fingerprint
from dearmpi.plan.data.schedule import AllGather, Conduct, Schedule
from dearmpi.plan.model.cost import Costs
from dearmpi.plan.model.profile import ModelProfile
from dearmpi.plan.search.improvement import improve
from dearmpi.plan.search.problem import BucketStarts, Draft, Drafts, Problem, least_iteration_s
from dearmpi.plan.simulate.timeline import simulate

_CLOSE = 5e-4  # relative distance from the bound at which a search ends that is not exact


def make_plan(
    profile: ModelProfile,
    costs: Costs,
    *,
    world_size: int,
    eager: bool,
    gather: Gather = "parameters",
) -> Plan:
    """The plan for ``profile`` over ``world_size`` ranks, whose ``costs`` these are.

    Decides on contiguous buckets of any sizes, on the gathers during backprop (with eager updates),
    their order and ties, and on the window. Serial and WFBP are among the schedules. Up to four
    tensors the plan is the best of all (``best_of_all``); beyond, it is the best found
    (``improvement``); ``prediction.bound_s`` bounds how much better any other plan could be. The
    same arguments make the same plan.

    Raises ConfigError for costs of another world size, and for a model that has nothing to train.
    """
    if costs.world_size != world_size:
        raise ConfigError(
            f"the plan is for world size {world_size}, but the costs are those of "
            f"{costs.world_size}; measure with as many, or give costs.at({world_size})",
            code="costs-of-other-world",
        )
    problem = Problem(profile, costs, eager=eager, gather=gather)
    if not problem.tensors:
        raise ConfigError(
            f"{profile.workload.name} has no trained parameter; unfreeze some before it is "
            "profiled",
            code="nothing-to-train",
        )
    bound_s = least_iteration_s(profile, costs, eager=eager, gather=gather)
    draft, how = _search(problem, bound_s)
    groups = problem.groups(draft.cuts)
    conduct = replace(draft.conduct, schedule=_with_idle(draft, len(groups)))
    return plan_of(profile, costs, build_layout(groups, world_size), conduct, origin=how)


def plan_of(
    profile: ModelProfile,
    costs: Costs,
    layout: BucketLayout,
    conduct: Conduct,
    *,
    origin: str,
) -> Plan:
    """The given layout and conduct as a plan, with its predicted time.

    Its parameters are listed as in the buckets, which need not be the feed-forward's order. Raises
    ConfigError if ``layout`` is of another model.
    """
    specs, eager, gather = list(profile.workload.params()), conduct.eager, conduct.gather
    timeline = simulate(profile, layout, conduct, costs)
    plan = Plan(
        parameters=tuple(name for bucket in layout for name in bucket.names),
        buckets=tuple(bucket.names for bucket in layout),
        schedule=conduct.schedule,
        window=conduct.window,
        eager=eager,
        world_size=layout.world_size,
        fingerprint=fingerprint(specs),
        prediction=Prediction(
            iteration_s=timeline.iteration_s,
            compute_s=timeline.compute_s,
            communication_s=timeline.communication_s,
            bound_s=least_iteration_s(profile, costs, eager=eager, gather=gather),
        ),
        origin=f"{origin} for {profile.workload.name} on {profile.device}",
        idle=tuple(index for index, bucket in enumerate(layout) if not bucket.trained),
        gather=gather,
    )
    plan.layout(specs, layout.world_size)
    return plan


def _search(problem: Problem, bound_s: float) -> tuple[Draft, str]:
    """The draft to make a plan of, and how good it is among all drafts, in words."""
    if len(problem.tensors) <= MOST_TENSORS:
        return best_of_all(problem, enough_s=bound_s), "the best of all plans"
    return improve(problem, enough_s=bound_s * (1 + _CLOSE)), "the best plan found"


def _with_idle(draft: Draft, num_buckets: int) -> Schedule:
    """The draft's schedule over all buckets; idle buckets come last."""
    idle = range(len(draft.cuts), num_buckets)
    return replace(
        draft.schedule,
        reduce_scatters=(*draft.schedule.reduce_scatters, *idle),
        all_gathers=(*draft.schedule.all_gathers, *(AllGather(i, after=i) for i in idle)),
    )


MOST_TENSORS = 4
MOST_IN_FLIGHT = 4


def best_of_all(problem: Problem, *, enough_s: float) -> Draft:
    """Return the draft of least time, or the first that takes ``enough_s`` or less.

    Tries all contiguous cuts, orders of gathers, ties to reduce-scatters, and windows up to the
    number of buckets. Reduce-scatters keep the order in which their buckets become ready. Where
    gradients are gathered before a step that waits for them, only serial and WFBP are tried.
    """
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


def all_cuts(problem: Problem) -> Iterator[BucketStarts]:
    """Every way to cut the tensors into contiguous buckets, fewest buckets first."""
    free = [number for number in range(len(problem.tensors)) if number not in problem.forced]
    for count in range(len(free) + 1):
        for chosen in combinations(free, count):
            yield tuple(sorted(problem.forced | set(chosen)))


def all_ties(num_buckets: int) -> Iterator[tuple[AllGather, ...]]:
    """Every order of gathers, with every tie that makes a difference.

    A gather is posted in its turn, once its bucket is updated and the reduce-scatter that it is
    tied to is complete. By then its own bucket, the buckets of earlier gathers and all that these
    were tied to are complete. So only a tie to another reduce-scatter makes a difference; a tie to
    the bucket's own stands for all others. Four buckets have 360 schedules of 6144.
    """
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
