"""How much memory does a rank need?

Usage: mpirun -n 4 python benchmarks/memory.py [WORKLOAD] [sgd|adam]

Prints the most memory in use at once while a replayed model trains, beyond what the process had
before the model was built, beside parameters + gradients + optimizer state / P + a window of
buckets. Large blocks go back to the system when they are freed (mallopt), so that the resident set
is what is in use; otherwise glibc keeps holes, which count as well.
"""

from __future__ import annotations

import ctypes
import sys

import torch

from dearmpi import DistributedOptimizer, connect
from dearmpi.bench.memory import peak_bytes, start_peak
from dearmpi.bench.replay import ReplayModel
from dearmpi.plan.profile import profile_workload
from dearmpi.plan.workload import read_workload

_MMAP_THRESHOLD, _THRESHOLD_BYTES = -3, 64 * 1024
_STATE_COPIES = {"sgd": 0, "adam": 2}
_NUM_STEPS = 4


def main() -> None:
    workload, name = [*sys.argv[1:], *("resnet50", "sgd")[len(sys.argv) - 1 :]]
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _THRESHOLD_BYTES)
    world = connect()
    torch.set_num_threads(1)
    start = start_peak()
    model = ReplayModel(
        profile_workload(read_workload(workload), feed_forward_s=0.1, backprop_s=0.2)
    )
    make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
    optimizer = DistributedOptimizer(make(model.parameters(), lr=0.01), model, world=world)
    for _ in range(_NUM_STEPS):
        optimizer.zero_grad()
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        optimizer.step()
    optimizer.synchronize()
    peak = world.all_reduce([float(peak_bytes(start) or 0)], "max")[0]
    if world.rank == 0:
        report(optimizer, _STATE_COPIES[name], world.size, peak)
    optimizer.close()


def report(optimizer: DistributedOptimizer, copies: int, size: int, peak: float) -> None:
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
        "measured": peak,
    }
    for title, nbytes in rows.items():
        print(f"{title:40s} {nbytes / 1e6:8.1f} MB")
    print(
        f"{'measured beyond the sum and the window':40s} {(peak - needed - window) / needed:8.1%}"
    )


if __name__ == "__main__":
    main()
