"""Does anything grow over many iterations: memory, file handles, threads, operations under way?

Usage: mpirun -n 2 python benchmarks/soak.py [ITERATIONS] [GATHER]

Trains a tiny model in two buckets and looks at every rank now and then. Prints the table of rank 0
and, over all ranks, the slope of resident memory after the first quarter, by least squares.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import numpy as np
import torch
from torch import nn

import dearmpi

_NUM_LOOKS = 20


def resident_bytes() -> int:
    """Memory of this process that lies in RAM."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    num_iterations = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    gather = sys.argv[2] if len(sys.argv) > 2 else "parameters"
    torch.set_num_threads(1)
    world = dearmpi.connect()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = dearmpi.DistributedOptimizer(
        torch.optim.AdamW(model.parameters()), model, gather=gather, bucket_cap_mb=0.0003
    )
    looks: list[tuple[int, int, int, int]] = []
    inputs = torch.ones(4, 8)
    if world.is_root:
        print(
            f"{'iteration':>10} {'resident MiB':>13} {'file handles':>13} {'threads':>8}",
            flush=True,
        )
    begin_s = time.perf_counter()
    for iteration in range(1, num_iterations + 1):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        if iteration % (num_iterations // _NUM_LOOKS) == 0:
            optimizer.synchronize()
            handles = len(os.listdir("/proc/self/fd"))
            looks.append((iteration, resident_bytes(), handles, threading.active_count()))
            if world.is_root:
                _, resident, _, threads = looks[-1]
                print(
                    f"{iteration:10} {resident / 2**20:13.3f} {handles:13} {threads:8}", flush=True
                )
    seconds = time.perf_counter() - begin_s
    steady = np.array(looks[_NUM_LOOKS // 4 :], dtype=np.float64)
    slope = float(np.polyfit(steady[:, 0], steady[:, 1], 1)[0])
    grown = max(looks[-1][2] - looks[0][2], looks[-1][3] - looks[0][3])
    most_slope, most_grown = world.all_reduce([slope, grown], "max")
    if world.is_root:
        print(
            f"{num_iterations} iterations on {world.size} ranks, gather {gather}, in {seconds:.0f} "
            f"s; steepest rank: {most_slope:+.2f} bytes per iteration; handles and threads grew "
            f"by at most {most_grown:.0f}"
        )


if __name__ == "__main__":
    main()
