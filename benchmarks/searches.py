"""The planner beside searches for one bucket cap, as the paper compares them, in simulation.

    python -m benchmarks.searches [--world-size 4] [--gigabits 1] [--trials 10]

Costs and profiles are those of planned.py. A trial of a search is one simulated iteration with
buckets of about the cap that it suggests, between 1 and 256 MiB, in DeAR's order with eager
updates. Times are over ``max(compute, communication)``; ``lost`` is what the trials of the Bayesian
search cost beyond iterations with the plan, in iterations, at five steps for each.
"""

from __future__ import annotations

import argparse
import random

from benchmarks.planned import assumed_costs, by_default, communication_of, planned, timed
from dearmpi.config import MIB
from dearmpi.plan.data.workload import read_workload, workload_names
from dearmpi.plan.model.cost import Costs
from dearmpi.plan.model.profile import ModelProfile
from dearmpi.tune.search import BayesianSearch, Search, SearchSpace

STEPS_PER_TRIAL = 5
COLUMNS = ("default", "grid", "random", "bayes", "plan", "lost")


class GridSearch(Search):
    """Caps in equal ratios from the lowest to the highest, the smallest first."""

    def _next_cap(self) -> int:
        return self.space.cap_bytes(len(self._trials) / max(1, self.num_trials - 1))


class RandomSearch(Search):
    """Caps drawn at random, every ratio as likely as any other; the same for the same seed."""

    def __init__(self, space: SearchSpace | None = None, *, num_trials: int, seed: int = 0) -> None:
        super().__init__(space, num_trials=num_trials)
        self._seed = seed

    def _next_cap(self) -> int:
        draw = random.Random(f"{self._seed} {len(self._trials)}")
        return self.space.cap_bytes(draw.random())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--gigabits", type=float, default=1.0)
    parser.add_argument("--trials", type=int, default=10)
    given = parser.parse_args()
    costs = assumed_costs(given.world_size, given.gigabits)
    print(f"{'workload':<13} ratio  {'  '.join(f'{name:>7}' for name in COLUMNS)}  caps found, MiB")
    for name in workload_names():
        workload = read_workload(name)
        for ratio in (0.5, 1.0, 2.0):
            profile = timed(workload, costs, ratio=ratio)
            bound_s = max(
                profile.feed_forward_s + profile.backprop_s, communication_of(workload, costs)
            )
            print(f"{name:<13} {ratio:5}  {row(profile, costs, given.trials, bound_s)}", flush=True)


def row(profile: ModelProfile, costs: Costs, num_trials: int, bound_s: float) -> str:
    """One line: times relative to ``bound_s``, and where each search has ended."""
    nbytes = sum(spec.nbytes for spec in profile.workload.params())
    space = SearchSpace(highest_bytes=min(256 * MIB, nbytes), start_bytes=min(25 * MIB, nbytes))
    searches: tuple[Search, ...] = (
        GridSearch(space, num_trials=num_trials),
        RandomSearch(space, num_trials=num_trials),
        BayesianSearch(space, num_trials=num_trials),
    )
    for search in searches:
        while not search.is_done:
            cap_bytes = search.suggest()
            search.observe(cap_bytes, by_default(profile, costs, cap_bytes=cap_bytes))
    plan_s = planned(profile, costs).prediction.iteration_s
    seconds = (
        by_default(profile, costs),
        *(search.best.seconds for search in searches),
        plan_s,
    )
    tried_s = sum(trial.seconds - plan_s for trial in searches[-1].trials)
    cells = "  ".join(f"{value / bound_s:7.3f}" for value in seconds)
    caps = ", ".join(f"{search.best.cap_bytes / MIB:.3g}" for search in searches)
    return f"{cells}  {STEPS_PER_TRIAL * tried_s / plan_s:7.1f}  {caps}"


if __name__ == "__main__":
    main()
