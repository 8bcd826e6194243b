"""How long does each method take to reach a loss?

Trains the transformer of bytes-lm, as it is by default, with Adam, each method from the same
parameters and on the same batches. After every 20 steps each rank computes the loss on held-out
data, while the clock stands still. A method ends once rank 0's loss is low enough.

Usage: mpirun -n 4 python benchmarks/time_to_loss.py [BITS [METHOD...]]
such as: bin/netlab run 4 python benchmarks/time_to_loss.py 2.2 dear dear:compress=int8 ddp-bf16
By default to 2.2 bits, codecs beside torch's hooks for fp16, bf16 and PowerSGD.
Prints for each method the steps, the seconds of a step and the seconds until held-out data take at
most BITS bits per byte.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from copy import deepcopy

import torch
from torch import nn

import dearmpi
from dearmpi import World
from dearmpi.bench.method import Method, Setup
from dearmpi.bench.method_names import read_method
from dearmpi.bench.torch_methods import join_group, leave_group
from dearmpi.train.tasks.bytes_lm import build_bytes_lm
from dearmpi.train.tasks.task import Task, collate

BITS = 2.2
METHODS = (
    "dear",
    "dear:comm_dtype=bf16",
    "dear:compress=int8",
    "dear:compress=int4",
    "ddp",
    "ddp-bf16",
    "ddp:comm_dtype=fp16",
    "ddp-powersgd:rank=4",
)
RATE = 3e-3
SAMPLES = 8  # of a rank in each step
EVALUATED = 512
EVERY = 20
MOST_STEPS = 4000


def held_out_bits(task: Task, model: nn.Module) -> float:
    """Bits per byte on held-out data."""
    assert task.eval_data is not None
    samples = collate(task, [task.eval_data[index] for index in range(EVALUATED)])
    with torch.no_grad():
        return float(task.loss(model, samples)) * task.loss_scale


def make_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=RATE, betas=(0.9, 0.99))


def train(world: World, task: Task, method: Method, bits: float) -> str:
    """The method's row of the table (collective)."""
    if method.uses_group:
        join_group(world)
    model = deepcopy(task.model)
    entrant = method.enter(Setup(world, model, make_optimizer, method.options))
    seconds, found, step = 0.0, held_out_bits(task, model), 0
    while found > bits and step < MOST_STEPS:
        world.barrier()
        begin_s = time.perf_counter()
        for _ in range(EVERY):
            generator = torch.Generator().manual_seed(step * world.size + world.rank)
            chosen = torch.randint(len(task.train_data), (SAMPLES,), generator=generator)
            batch = collate(task, [task.train_data[int(index)] for index in chosen])
            entrant.optimizer.zero_grad()
            entrant.backward(task.loss(entrant.model, batch))
            entrant.optimizer.step()
            step += 1
        entrant.finish()
        world.barrier()
        seconds += time.perf_counter() - begin_s
        found = float(world.broadcast_text(repr(held_out_bits(task, model))))
    entrant.close()
    del entrant
    if method.uses_group:
        leave_group(failed=False)
    reached = f"{seconds:.1f}" if found <= bits else f"not in {step} steps: {found:.3f} bits"
    return f"| `{method.label}` | {step} | {seconds / max(step, 1):.4f} | {reached} |"


def main() -> None:
    """A row for each method, as soon as it is known."""
    torch.set_num_threads(1)
    bits = float(sys.argv[1]) if sys.argv[1:] else BITS
    methods = [read_method(text) for text in sys.argv[2:] or METHODS]
    world = dearmpi.connect()
    torch.manual_seed(0)
    task = build_bytes_lm({})
    if world.is_root:
        numel = sum(param.numel() for param in task.model.parameters())
        print(f"{numel:,} parameters\n| method | steps | s per step | s to {bits:g} bits |")
        print("|---|---|---|---|", flush=True)
    for method in methods:
        row = train(world, task, method, bits)
        if world.is_root:
            print(row, flush=True)


if __name__ == "__main__":
    main()
