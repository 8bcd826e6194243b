"""What do owners save an optimizer that needs whole tensors?

A language model like GPT-2 trains by Muon, its embeddings, vectors and head by AdamW: first with
``gather="gradients"``, where every rank updates all, then with ``shards="whole"``, where the owner
of a matrix does, and all other parameters are cut. CPU time is that of the threads that update;
bytes are those of the state.

Usage: mpirun -n 4 python benchmarks/owners.py [WIDTH [DEPTH]]; default 128 6
Prints medians over the steps of the slowest rank, of all ranks, and their mean.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import dearmpi
from dearmpi.comm.world import World
from dearmpi.engine.state.sharded_state import LocalState
from dearmpi.train.loop.muon import MuonWithAdamW, muon_groups
from dearmpi.train.tasks.transformer import Transformer, TransformerShape

NUM_WARMUP, NUM_STEPS = 1, 5
CONTEXT, BATCH = 32, 2
SECONDS: list[float] = []  # of CPU, of the updates of a step


class TimedMuon(MuonWithAdamW):
    """Adds up the CPU time of its steps, of which each bucket takes one."""

    def step(self, closure: Any = None) -> Any:
        """As ``MuonWithAdamW`` does."""
        begin_s = time.thread_time()
        loss = super().step(closure)
        SECONDS.append(time.thread_time() - begin_s)
        return loss


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors, in whatever they are."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def state_bytes(state: LocalState) -> int:
    """What this rank holds."""
    pieces = [piece.tensors for piece in state.pieces]
    return sum(tensor.nbytes for tensor in tensors_in([state.whole, state.owned, pieces]))


def train(world: World, shape: TransformerShape, **settings: Any) -> tuple[float, float, int]:
    """Seconds of CPU that updates take in a step, seconds of the step, and bytes of state."""
    torch.manual_seed(0)
    model: nn.Module = Transformer(shape)
    inner = TimedMuon(muon_groups(model, list(model.parameters())), lr=0.01)
    optimizer = dearmpi.DistributedOptimizer(inner, model, world=world, **settings)
    tokens = torch.randint(shape.vocabulary, (BATCH, shape.context))
    updates, steps = [], []
    for _ in range(NUM_WARMUP + NUM_STEPS):
        optimizer.synchronize()
        world.barrier()
        SECONDS.clear()
        begin_s = time.perf_counter()
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.synchronize()
        steps.append(time.perf_counter() - begin_s)
        updates.append(sum(SECONDS))
    nbytes = state_bytes(optimizer.local_state())
    optimizer.close()
    kept = slice(NUM_WARMUP, None)
    return statistics.median(updates[kept]), statistics.median(steps[kept]), nbytes


def main() -> None:
    """Print a row for each way, and the shares of the second in the first."""
    world = dearmpi.connect()
    torch.set_num_threads(1)
    width, depth = ([int(word) for word in sys.argv[1:]] + [128, 6][len(sys.argv) - 1 :])[:2]
    shape = TransformerShape(vocabulary=1024, context=CONTEXT, width=width, depth=depth, heads=4)
    ways = {"gather='gradients'": {"gather": "gradients"}, "shards='whole'": {"shards": "whole"}}
    rows = {}
    for name, settings in ways.items():
        own = train(world, shape, **settings)
        slowest = world.all_reduce(list(own), "max")
        rows[name] = [*slowest, world.all_reduce([own[0]], "sum")[0] / world.size]
    if world.is_root:
        print(f"{world.size} ranks, width {width}, depth {depth}")
        print(f"{'':22}{'update, s of CPU':>18}{'its mean':>10}{'step, s':>10}{'state, MB':>11}")
        for name, (update, step, nbytes, mean) in rows.items():
            print(f"{name:22}{update:18.3f}{mean:10.3f}{step:10.3f}{nbytes / 1e6:11.2f}")
        shares = [after / before for before, after in zip(*rows.values(), strict=True)]
        print(f"{'share':22}{shares[0]:18.2f}{shares[3]:10.2f}{shares[1]:10.2f}{shares[2]:11.2f}")


if __name__ == "__main__":
    main()
