"""How long does training stand still until it follows a plan of its own?

    mpirun -n 4 python benchmarks/taking_up.py [WORKLOAD] [sgd|adam] [ITERATION_S]

Trains a replayed model with ``plan="auto"``, and prints what the optimizer says of its pause, and
the iterations around it. The plan is taken up whatever it gains: its cost is the question.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from statistics import median
from unittest.mock import patch

import torch

from dearmpi import DistributedOptimizer, connect
from dearmpi.bench.process_memory import reuse_pages
from dearmpi.bench.replay import ReplayModel
from dearmpi.engine.setup import self_planning
from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.model.profile import profile_workload
from dearmpi.tune.plan_process import PlanProcess, PlanRequest

DEFAULTS = ("resnet50", "adam", "1.0")


class AnyPlan(PlanProcess):
    """Makes a plan that need not gain anything over the buckets in use."""

    def __init__(self, request: PlanRequest) -> None:
        super().__init__(replace(request, standing=None))


@patch.object(self_planning, "PlanProcess", AnyPlan)
def main() -> None:
    """Train until the plan is followed, and a few steps more."""
    name, kind, text = [*sys.argv[1:], *DEFAULTS[len(sys.argv) - 1 :]]
    compute_s = float(text)
    reuse_pages()
    world = connect()
    torch.set_num_threads(1)
    profile = profile_workload(
        read_workload(name), feed_forward_s=compute_s / 3, backprop_s=compute_s * 2 / 3
    )
    model = ReplayModel(profile)
    make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[kind]
    optimizer = DistributedOptimizer(
        make(model.parameters(), lr=0.01), model, world=world, eager=True, plan="auto"
    )
    seconds: list[float] = []
    before = 0
    while optimizer.is_planning or len(seconds) < before + 6:
        if optimizer.is_planning:
            before = len(seconds) + 1
        begin_s = time.perf_counter()
        optimizer.zero_grad()
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin_s)
    optimizer.synchronize()
    slowest = world.all_reduce(seconds, "max")
    if world.rank == 0:
        report(optimizer, slowest, num_before=before)
    optimizer.close()


def report(optimizer: DistributedOptimizer, seconds: list[float], *, num_before: int) -> None:
    """Print the pause, and how iterations went before and after it."""
    pause, usual_s = optimizer.plan_pause, median(seconds[1 : num_before - 1])
    assert pause is not None
    print(
        f"plan taken up after {num_before} iterations, in {pause.total_s:.2f} s: waiting "
        f"{pause.waiting_s:.2f}, laying out {pause.laying_out_s:.2f}; link measured before, in "
        f"{pause.measuring_s:.2f}"
    )
    # The state is on its way behind the next one, and may hold up the gathers of that.
    then, planned_s = seconds[num_before - 1 : num_before + 2], median(seconds[num_before + 2 :])
    more_s = sum(then) - 2 * usual_s - planned_s
    print(
        f"iterations of {usual_s:.3f} s before and {planned_s:.3f} s after it; that one and the "
        f"next two: {', '.join(f'{value:.3f}' for value in then)} s, {more_s:.3f} s more than two "
        "such before and one after"
    )


if __name__ == "__main__":
    main()
