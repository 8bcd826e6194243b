"""What a start costs as ranks grow in number, on one machine: seconds, and memory of each rank.

    python benchmarks/many_ranks.py 8 32 64

Each job trains a small model for three steps and stops. Memory is what a rank shares with no other
process, and what it shares in MPI's segments. The last row goes on to 4,096 ranks by the line
through the first and the last job. 64 ranks need about 12 GiB.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

LIMIT_S = 300.0
FAR = 4096
MOMENTS = ("imported", "connected", "made", "trained")


def resident() -> dict[str, float]:
    """MB of this process: private, and in segments that ranks share."""
    found = dict.fromkeys(("Private_Clean", "Private_Dirty"), 0.0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        if name in found:
            found[name] = int(value.split()[0]) / 1e3
    status = Path("/proc/self/status").read_text()
    segments = next(line.split()[1] for line in status.splitlines() if "RssShmem" in line)
    return {"private": sum(found.values()), "segments": int(segments) / 1e3}


def train() -> None:
    """One rank of a job; rank 0 prints medians over the ranks."""
    import torch

    import dearmpi

    start_s, rows = time.monotonic(), [resident()]
    world = dearmpi.connect()
    connect_s = time.monotonic() - start_s
    rows.append(resident())
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start_s = time.monotonic()
    optimizer = dearmpi.DistributedOptimizer(inner, model)
    make_s = time.monotonic() - start_s
    rows.append(resident())
    start_s = time.monotonic()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
    optimizer.synchronize()
    step_s = (time.monotonic() - start_s) / 3
    rows.append(resident())
    ranks = [json.loads(text) for text in world.all_gather_text(json.dumps(rows))]
    if world.is_root:
        memory = [
            {key: statistics.median(rank[moment][key] for rank in ranks) for key in rows[0]}
            for moment in range(len(MOMENTS))
        ]
        seconds = {"connect": connect_s, "make": make_s, "step": step_s}
        print(json.dumps({"memory": memory, "seconds": seconds}), flush=True)
    optimizer.close()


def measure(num_ranks: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Of a job: MB by kind and moment, and seconds."""
    command = ["mpirun", "-n", str(num_ranks), sys.executable, __file__, "rank"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start_s = time.monotonic()
    job = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, timeout=LIMIT_S, check=True, text=True
    )
    whole_s = time.monotonic() - start_s
    found = json.loads(job.stdout.splitlines()[-1])
    memory = {key: [row[key] for row in found["memory"]] for key in found["memory"][0]}
    return memory, {**found["seconds"], "job": whole_s}


def main(sizes: list[int]) -> None:
    """A row for each number of ranks, and where the line through the ends leads."""
    heads = [f"{kind} {moment}" for kind in ("private", "segments") for moment in MOMENTS]
    print("| ranks | connect s | make s | step s | job s | MB " + " | MB ".join(heads) + " |")
    print("|---" * (len(heads) + 5) + "|")
    table = []
    for num_ranks in sizes:
        memory, seconds = measure(num_ranks)
        row = [*memory["private"], *memory["segments"]]
        table.append((num_ranks, row))
        told = [f"{seconds[key]:.2f}" for key in ("connect", "make", "step", "job")]
        print("| " + " | ".join([str(num_ranks), *told, *(f"{mb:.1f}" for mb in row)]) + " |")
    (first, low), (last, high) = table[0], table[-1]
    if last > first:
        slopes = [(b - a) / (last - first) for a, b in zip(low, high, strict=True)]
        far = [b + slope * (FAR - last) for b, slope in zip(high, slopes, strict=True)]
        print(f"| {FAR}, by the line | | | | | " + " | ".join(f"{mb:.0f}" for mb in far) + " |")


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        train()
    else:
        main([int(size) for size in sys.argv[1:]] or [8, 32, 64])
