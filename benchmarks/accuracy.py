"""How much accuracy do each `compress` and local steps cost, beside what seeds differ by?

A small bytes-lm transformer, equal steps for all, three seeds each. Adam learns with what any
optimizer bears, SGD with what needs one that is linear in the gradient; "local" is Adam on ranks
that train alone between exchanges. Buckets of any size are compressed.

Usage: mpirun -n 2 python benchmarks/accuracy.py [STEPS [OPTIMIZER [WAY,...]]]
By default 200 steps, Adam and SGD, and all ways; a way such as int8 is named as in the table.
"local" is not among the default ones: mpirun -n 4 python benchmarks/accuracy.py 1800 local
Prints for each way the bits per byte on held-out data, their mean over the seeds and what that is
above the one of the same optimizer with dense gradients, and the bytes of a step beside its.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
import warnings
from copy import deepcopy
from functools import cache
from typing import Any

import torch

import dearmpi
from dearmpi import DistributedOptimizer, EngineConfig, LocalOptimizer, World
from dearmpi.engine.bucket import bucket
from dearmpi.train.tasks.bytes_lm import build_bytes_lm
from dearmpi.train.tasks.task import Task, collate

STEPS = 200
WARMUP = 20
SEEDS = (0, 1, 2)
SAMPLES = 4  # of a rank in each step
EVALUATED = 512
RATES = {"Adam": 5e-3, "SGD": 0.1, "local": 5e-3}
SPARSE = ("random-block", "random-k", "topk", "block-topk")
DENSITY = 0.1

ADAM: list[dict[str, Any]] = [
    {},
    {"comm_dtype": "bf16"},
    {"compress": "int8"},
    {"compress": "int4"},
    {"compress": "nonzero"},
    *({"compress": how, "density": DENSITY, "error_feedback": "ef21"} for how in SPARSE),
]
SGD: list[dict[str, Any]] = [
    {},
    *({"compress": how, "density": DENSITY} for how in SPARSE),
    {"compress": "powersgd", "gather": "gradients"},
    {"compress": "sketch"},
]
DILOCO: dict[str, Any] = {"sync_every": 20, "outer_lr": 0.7, "outer_momentum": 0.8}
BLOCKING: dict[str, Any] = {"fragments": 1, "delay": 0, "compress": "none"}
STREAMING: dict[str, Any] = {"fragments": 3, "delay": 5, "compress": "int4"}
LOCAL: list[dict[str, Any]] = [  # after so many steps with averaged gradients
    {},
    {"sync_after": 600, **DILOCO, **BLOCKING},
    {"sync_after": 200, **DILOCO, **BLOCKING},
    {"sync_after": 600, **DILOCO, **STREAMING},
    {"sync_after": 600, **DILOCO, **STREAMING, "mix": 0.5},
    {"sync_after": 600, **DILOCO, "outer_momentum": 0.9, **BLOCKING},
]


def train(
    world: World, task: Task, name: str, seed: int, num_steps: int, settings: dict[str, Any]
) -> tuple[float, float]:
    """Bits per byte on held-out data, and bytes of the last step beside the dense ones."""
    model = deepcopy(build(seed).model)
    inner: torch.optim.Optimizer
    if name == "SGD":
        inner = torch.optim.SGD(model.parameters(), lr=RATES[name])
    else:
        inner = torch.optim.Adam(model.parameters(), lr=RATES[name], betas=(0.9, 0.99))
    optimizer: DistributedOptimizer | LocalOptimizer
    if "sync_every" in settings:
        optimizer = LocalOptimizer(inner, model, world=world, **settings)
    else:
        config = EngineConfig(bucket_cap_mb=4.0, **settings)
        optimizer = DistributedOptimizer(inner, model, world=world, config=config)
    curve = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * (1.0 - step / num_steps)
    )
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(
            (seed * num_steps + step) * world.size + world.rank
        )
        chosen = torch.randint(len(task.train_data), (SAMPLES,), generator=generator)
        batch = collate(task, [task.train_data[int(index)] for index in chosen])
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.clip_grad_norm_(math.inf if name == "SGD" else 1.0)
        optimizer.step()
        curve.step()
    optimizer.synchronize()
    traffic = optimizer.traffic
    if isinstance(optimizer, LocalOptimizer):
        optimizer.show_anchor()
    optimizer.close()
    assert task.eval_data is not None
    held_out = collate(task, [task.eval_data[index] for index in range(EVALUATED)])
    with torch.no_grad():
        loss = float(task.loss(model, held_out)) * task.loss_scale
    after = settings.get("sync_after", 0) / num_steps
    sent = (traffic.reduced + traffic.gathered) / traffic.dense / settings.get("sync_every", 1)
    return loss, after + (1 - after) * sent


@cache
def build(seed: int) -> Task:
    """The task, small, with a model of that seed."""
    torch.manual_seed(seed)
    return build_bytes_lm({"width": "64", "depth": "2", "heads": "2", "max_bytes": "1000000"})


def name_of(settings: dict[str, Any]) -> str:
    """The way in words."""
    told = ("sync_after", "outer_lr", "outer_momentum", "fragments", "delay", "mix")
    given = (
        f"{key} {value}" if key in told else str(value)
        for key, value in settings.items()
        if DILOCO.get(key) != value
    )
    return ", ".join(given) or "fp32"


def main() -> None:
    """A row for each way."""
    torch.set_num_threads(1)
    bucket._LEAST_COMPRESSED = 1
    warnings.simplefilter("ignore")  # of what is owed at the end
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    choices = {"Adam": ADAM, "SGD": SGD, "local": LOCAL}
    names = sys.argv[2:3] or ["Adam", "SGD"]
    choices = {name: choices[name] for name in names}
    named = sys.argv[3].split(",") if len(sys.argv) > 3 else None
    begin_s = time.perf_counter()
    world = dearmpi.connect()
    task = build(0)
    if world.is_root:
        print("| optimizer | way | bits per byte | spread | more | bytes | by seed |")
        print("|---|---|---|---|---|---|---|", flush=True)
    for name, ways in choices.items():
        dense = math.nan
        for settings in ways:
            if named is not None and name_of(settings) not in named:
                continue
            found = [train(world, task, name, seed, num_steps, settings) for seed in SEEDS]
            losses = [loss for loss, _ in found]
            mean, spread = statistics.fmean(losses), max(losses) - min(losses)
            dense = mean if not settings else dense
            if world.is_root:
                figures = f"{mean:.3f} | {spread:.3f} | {mean - dense:+.3f}"
                words = [name, name_of(settings), figures, f"{found[0][1]:.3f}"]
                words.append(", ".join(f"{loss:.3f}" for loss in losses))
                print(f"| {' | '.join(words)} |", flush=True)
    if world.is_root:
        print(f"\n{time.perf_counter() - begin_s:.0f} s")


if __name__ == "__main__":
    main()
