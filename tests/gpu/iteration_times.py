"""Part: iteration times of this package and of torch's DDP over gloo, in turn, on one device."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy

import torch
from torch import nn

import dearmpi
from dearmpi.bench.torch_methods import join_group, leave_group
from dearmpi.comm.world import World
from tests.gpu.machine import IS_DRY, device, say, seconds_each
from tests.gpu.models import WORKLOADS, Workload

NUM_ROUNDS, NUM_MEASURED = 2, 3
ENOUGH_S = 20.0  # a round that has taken as long is not repeated


def steps_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, workload: Workload, size: int
) -> Callable[[], None]:
    inputs, labels = workload.batch(size, device())

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def measure(world: World, workload: Workload, method: str, built: nn.Module) -> float:
    model = deepcopy(built)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer: torch.optim.Optimizer = inner
    if method == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    elif method == "dear":
        optimizer = dearmpi.DistributedOptimizer(inner, model, world=world, eager=True)
    step = steps_of(model, optimizer, workload, 2 if IS_DRY else workload.batch_size)
    for _ in range(1 if IS_DRY else 3):
        step()
    seconds = seconds_each(world, step, num=1 if IS_DRY else NUM_MEASURED)
    if isinstance(optimizer, dearmpi.DistributedOptimizer):
        optimizer.close()
    return seconds


def main() -> None:
    world = dearmpi.connect()
    join_group(world)
    for name in ["resnet50"] if IS_DRY else ["resnet50", "bert_base"]:
        built = WORKLOADS[name].build().to(device())
        best = dict.fromkeys(("alone", "dear", "DDP"), float("inf"))
        for _ in range(1 if IS_DRY else NUM_ROUNDS):
            began_s = time.monotonic()
            for method in best:
                best[method] = min(best[method], measure(world, WORKLOADS[name], method, built))
            if world.all_reduce([time.monotonic() - began_s], "max")[0] > ENOUGH_S:
                break
        figures = ", ".join(f"{method} {1e3 * seconds:.1f} ms" for method, seconds in best.items())
        ratio = best["dear"] / best["DDP"]
        say(world, f"iteration, {name}", f"{world.size} ranks", f"{figures}; dear/DDP {ratio:.2f}")
    leave_group(failed=False)


main()
