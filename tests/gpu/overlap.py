"""Part: a trace of copies, MPI and computation, and how much of the copies computation covers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

import dearmpi
from tests.gpu.machine import FOLDER, IS_DRY, device, say, settle
from tests.gpu.models import WORKLOADS

Interval = tuple[float, float]
NUM_WARMUP, NUM_TRACED = (1, 1) if IS_DRY else (5, 3)


def merged(intervals: list[Interval]) -> list[Interval]:
    """The union, in order."""
    union: list[Interval] = []
    for start, stop in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(stop, union[-1][1]))
        else:
            union.append((start, stop))
    return union


def shared(one: list[Interval], other: list[Interval]) -> float:
    """How long both are under way."""
    left, right = merged(one), merged(other)
    pairs = ((max(a, c), min(b, d)) for a, b in left for c, d in right)
    return sum(max(0.0, stop - start) for start, stop in pairs)


def read(path: Path, *categories: str, containing: str = "") -> list[Interval]:
    """Start and stop of a trace's events, in microseconds."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in categories and "dur" in event and containing in event["name"]
    ]


def main() -> None:
    world = dearmpi.connect()
    workload = WORKLOADS["resnet50"]
    model = workload.build().to(device())
    inner = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = dearmpi.DistributedOptimizer(inner, model, world=world, eager=True)
    inputs, labels = workload.batch(2 if IS_DRY else workload.batch_size, device())
    activities = [ProfilerActivity.CPU] + ([] if IS_DRY else [ProfilerActivity.CUDA])
    everywhere = _ExperimentalConfig(profile_all_threads=True)  # MPI has a thread of its own

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    for _ in range(NUM_WARMUP):
        step()
    settle()
    world.barrier()
    with profile(activities=activities, experimental_config=everywhere) as profiler:
        for _ in range(NUM_TRACED):
            step()
        optimizer.synchronize()
        settle()
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / "trace-rank0.json.gz"
    if world.is_root:
        profiler.export_chrome_trace(str(path))
        tell(path)
    optimizer.close()


def tell(path: Path) -> None:
    posted = len(read(path, "user_annotation", "cpu_op", containing=" posted"))
    kernels = read(path, "kernel")
    rows = [f"{posted / NUM_TRACED:.0f} collectives an iteration"]
    for way in ("DtoH", "HtoD"):
        copies = read(path, "gpu_memcpy", containing=way)
        total = shared(copies, copies)
        share = shared(copies, kernels) / total if total else 0.0
        rows.append(f"{way} {total / 1e3 / NUM_TRACED:.1f} ms an iteration, {share:.0%} covered")
    say(None, "copies beside computation", "2 ranks", f"{'; '.join(rows)}; {path}")


main()
