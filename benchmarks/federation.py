"""How many numbers do CompressedScaffnew and TAMUNA send until the optimum, beside Scaffnew?

100 clients with unequal data, breast-cancer and digits, by condition, sparsity and cohort, of which
one is no larger than the sparsity. What a client sends counts 1, what it receives a tenth.

Usage: python -m benchmarks.federation [TASK...] [CONDITION...]
By default both tasks, and conditions 1e3 and 1e4. Prints for each sparsity and cohort the cost as
part of Scaffnew's until the squared distance is 1e-8, a mean over three seeds, and its rounds as
multiple.
"stopped": one of the seeds was too slow to arrive within 20,000 rounds.
"""

from __future__ import annotations

import math
import statistics
import sys
from functools import cache

import torch
from torch import Tensor

import dearmpi
from dearmpi.local.federation import Algorithm, FederationSettings, Trajectory, run_algorithm
from dearmpi.train.tasks.logistic import LogisticProblem, logistic_problem

CLIENTS, TARGET, DOWN_WEIGHT, SEEDS = 100, 1e-8, 0.1, (0, 1, 2)
SPARSITIES, COHORTS = (2, 4, 6, 10), (0, 10)  # 0: as the sparsity
TASKS = ("breast-cancer", "digits")


@cache
def problem_of(task: str, condition: float) -> tuple[LogisticProblem, Tensor]:
    """Of a task, with its optimum."""
    problem = logistic_problem(task, num_clients=CLIENTS, condition=condition)
    return problem, problem.optimum()


def solve(
    task: str, condition: float, algorithm: Algorithm, settings: FederationSettings
) -> Trajectory:
    """One algorithm until it arrives (collective)."""
    problem, optimum = problem_of(task, condition)
    return run_algorithm(
        algorithm,
        settings,
        start=torch.zeros_like(optimum),
        optimum=optimum,
        smoothness=(problem.smoothness, problem.convexity),
        slopes_of=problem.slopes_of,
        world=dearmpi.connect(),
    )


def means(
    task: str, condition: float, algorithm: Algorithm, sparsity: int, cohort: int
) -> tuple[float, float]:
    """Cost and rounds, as means over seeds; NaN if one run did not arrive."""
    ends = []
    for seed in SEEDS:
        settings = FederationSettings(
            CLIENTS,
            cohort=cohort,
            sparsity=sparsity,
            target=TARGET,
            down_weight=DOWN_WEIGHT,
            seed=seed,
        )
        found = solve(task, condition, algorithm, settings)
        if not found.has_arrived:
            return float("nan"), float("nan")
        ends.append((found.cost(found.ends[-1]), found.ends[-1].rounds))
    costs, rounds = zip(*ends, strict=True)
    return statistics.mean(costs), statistics.mean(rounds)


def main() -> None:
    tasks = [text for text in sys.argv[1:] if text in TASKS]
    conditions = [float(text) for text in sys.argv[1:] if text not in TASKS]
    is_root = dearmpi.connect().is_root
    for task in tasks or TASKS:
        for condition in conditions or [1e3, 1e4]:
            cost, rounds = means(task, condition, "scaffnew", CLIENTS, CLIENTS)
            if is_root:
                size = problem_of(task, condition)[0].size
                print(f"\n{task}, {size} numbers, condition {condition:g}: {rounds:.0f} rounds")
                print(
                    "| sparsity | " + " | ".join(f"cohort {one or 's'}" for one in COHORTS) + " |"
                )
                print("|---|" + "---|" * len(COHORTS))
            for sparsity in SPARSITIES:
                cells = []
                for cohort in COHORTS:
                    if 0 < cohort <= sparsity:
                        cells.append("")
                        continue
                    own, own_rounds = means(task, condition, "tamuna", sparsity, cohort or sparsity)
                    text = f"{own / cost:.2f}, {own_rounds / rounds:.1f}x"
                    cells.append("stopped" if math.isnan(own) else text)
                if is_root:
                    print(f"| {sparsity} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
