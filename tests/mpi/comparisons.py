"""Contests that are over soon."""

from __future__ import annotations

from dataclasses import replace

from dearmpi.bench.comparison import Length, compare_methods
from dearmpi.bench.method import Method
from dearmpi.bench.result import Result
from dearmpi.bench.workload_model import ReplayedModel
from dearmpi.comm.world import World
from dearmpi.plan.data.workload import Workload, read_workload
from dearmpi.plan.model.profile import profile_workload

SHORT = Length(num_warmup=1, num_batches=2, num_rounds=1, patience_s=60.0)


def contest(
    world: World,
    *methods: Method,
    workload: Workload | None = None,
    num_rounds: int = 1,
    patience_s: float = SHORT.patience_s,
    compute_s: float = 0.006,
) -> tuple[Result, list[str]]:
    lines: list[str] = []
    subject = ReplayedModel(
        profile_workload(
            workload or read_workload("equal:0.1:4"),
            feed_forward_s=compute_s / 3,
            backprop_s=2 * compute_s / 3,
        ),
        batch_size=8,
        rank=world.rank,
        world_size=world.size,
    )
    length = replace(SHORT, num_rounds=num_rounds, patience_s=patience_s)
    return compare_methods(world, subject, methods, length=length, tell=lines.append), lines
