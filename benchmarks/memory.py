"""How much memory does a rank need?

Usage: mpirun -n 4 python benchmarks/memory.py [WORKLOAD] [sgd|adam]

Prints the most memory in use at once while a replayed model trains, beyond what the process had
before the model was built, beside parameters + gradients + optimizer state / P + a window of
buckets. Before that the same model trains in plain torch, which needs more than parameters,
gradients and state as well: two gradients of a tied weight at once, and the pages of its own code
that it touches for the first time, which the engine then finds in use. Large blocks go back to the
system when they are freed (mallopt), so that the resident set is what is in use; otherwise glibc
keeps holes, which count as well.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import torch

from dearmpi import DistributedOptimizer, connect
from dearmpi.bench.process_memory import peak_bytes, start_peak
from dearmpi.bench.replay import ReplayModel
from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.model.profile import profile_workload

_MMAP_THRESHOLD, _THRESHOLD_BYTES = -3, 64 * 1024
_STATE_COPIES = {"sgd": 0, "adam": 2}
_NUM_STEPS = 4


def main() -> None:
    workload, name = [*sys.argv[1:], *("resnet50", "sgd")[len(sys.argv) - 1 :]]
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _THRESHOLD_BYTES)
    world = connect()
    torch.set_num_threads(1)

    def make(model: ReplayModel) -> torch.optim.Optimizer:
        kind: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
        made: torch.optim.Optimizer = kind(model.parameters(), lr=0.01)
        return made

    plain = train(workload, make)
    found: list[DistributedOptimizer] = []

    def distribute(model: ReplayModel) -> torch.optim.Optimizer:
        found.append(DistributedOptimizer(make(model), model, world=world))
        return found[0]

    measured = train(workload, distribute)
    plain, measured = world.all_reduce([plain, measured], "max")
    if world.rank == 0:
        report(found[0], _STATE_COPIES[name], world.size, plain=plain, measured=measured)
    found[0].close()


def train(workload: str, make: Callable[[ReplayModel], torch.optim.Optimizer]) -> float:
    """The most bytes in use while a new model trains with the optimizer that ``make`` makes."""
    start = start_peak()
    model = ReplayModel(
        profile_workload(read_workload(workload), feed_forward_s=0.1, backprop_s=0.2)
    )
    optimizer = make(model)
    for _ in range(_NUM_STEPS):
        optimizer.zero_grad()
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        optimizer.step()
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.synchronize()
    return float(peak_bytes(start) or 0)


def report(
    optimizer: DistributedOptimizer, copies: int, size: int, *, plain: float, measured: float
) -> None:
    """Print what is needed by count, and what was measured on the rank that needed most."""
    buckets = [bucket.nbytes for bucket in optimizer.layout]
    parameters, window = sum(buckets), sum(sorted(buckets)[-optimizer.config.window :])
    state = copies * parameters / size
    needed = 2 * parameters + state
    rows = {
        "parameters": parameters,
        "gradients": parameters,
        f"optimizer state / {size}": state,
        "their sum": needed,
        f"a window of {optimizer.config.window} buckets, at most": window,
        "measured": measured,
        "plain torch, measured": plain,
        "of it beyond parameters, gradients, state": plain - (2 + copies) * parameters,
    }
    for title, nbytes in rows.items():
        print(f"{title:42s} {nbytes / 1e6:8.1f} MB")
    beyond = (measured - needed - window) / needed
    print(f"{'measured beyond the sum and the window':42s} {beyond:8.1%}")


if __name__ == "__main__":
    main()
