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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn

import dearmpi
from dearmpi.config import Gather

_NUM_LOOKS = 20


@dataclass(frozen=True, slots=True)
class Look:
    """What a rank held after an iteration."""

    iteration: int
    resident_bytes: int
    num_handles: int
    num_threads: int

    def row(self) -> str:
        """A line of the table."""
        return (
            f"{self.iteration:10} {self.resident_bytes / 2**20:13.3f} {self.num_handles:13} "
            f"{self.num_threads:8}"
        )


def look(iteration: int) -> Look:
    """At this process."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Look(
        iteration,
        num_pages * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
    )


def growth(looks: Sequence[Look]) -> tuple[float, int]:
    """Bytes of resident memory per iteration after the first quarter, and of handles or threads."""
    steady = looks[_NUM_LOOKS // 4 :]
    sizes = [one.resident_bytes for one in steady]
    slope = float(np.polyfit([one.iteration for one in steady], sizes, 1)[0])
    first, last = looks[0], looks[-1]
    grown = max(last.num_handles - first.num_handles, last.num_threads - first.num_threads)
    return slope, grown


def main() -> None:
    num_iterations = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    gather = cast(Gather, sys.argv[2] if len(sys.argv) > 2 else "parameters")
    torch.set_num_threads(1)
    world = dearmpi.connect()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = dearmpi.DistributedOptimizer(
        torch.optim.AdamW(model.parameters()), model, gather=gather, bucket_cap_mb=0.0003
    )
    looks: list[Look] = []
    inputs = torch.ones(4, 8)

    def tell(line: str) -> None:
        if world.is_root:
            print(line, flush=True)

    tell(f"{'iteration':>10} {'resident MiB':>13} {'file handles':>13} {'threads':>8}")
    begin_s = time.perf_counter()
    for iteration in range(1, num_iterations + 1):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        if iteration % (num_iterations // _NUM_LOOKS) == 0:
            optimizer.synchronize()
            looks.append(look(iteration))
            tell(looks[-1].row())
    seconds = time.perf_counter() - begin_s
    most_slope, most_grown = world.all_reduce([*growth(looks)], "max")
    tell(
        f"{num_iterations} iterations on {world.size} ranks, gather {gather}, in {seconds:.0f} s; "
        f"steepest rank: {most_slope:+.2f} bytes per iteration; handles and threads grew by at "
        f"most {most_grown:.0f}"
    )


if __name__ == "__main__":
    main()
