"""What does ``compress="nonzero"`` gain where gradients are mostly zero?

Trains an embedding of 50,000 x 64 with a small network on top, on made-up batches of 512 indices a
rank, with and without compression in turns. Computation and gradients are real.

Usage: bin/netlab run 4 python benchmarks/embedding.py [sgd|adam]
Prints for both ways of gathering the median seconds of an iteration, the bytes that a rank sends,
and whether parameters are equal to the last bit in the end.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import nn

import dearmpi
from dearmpi.config import Compress, Gather

NUM_ROWS, WIDTH, NUM_IDS, NUM_FIELDS = 50_000, 64, 512, 8
NUM_BLOCKS, BLOCK_STEPS, WARM_UP_STEPS = 5, 4, 3


@dataclass
class Method:
    """One way of training, and what it took."""

    world: dearmpi.World
    gather: Gather
    compress: Compress
    inner: str
    seconds: list[float] = field(default_factory=list)
    num_steps: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Embedding(NUM_ROWS, WIDTH),
            nn.Flatten(),
            nn.Linear(WIDTH * NUM_FIELDS, 64),
            nn.ReLU(),
            nn.Linear(64, 1),
        )
        params = self.model.parameters()
        plain = torch.optim.SGD(params, lr=0.1) if self.inner == "sgd" else torch.optim.Adam(params)
        self.optimizer = dearmpi.DistributedOptimizer(
            plain,
            self.model,
            world=self.world,
            gather=self.gather,
            compress=self.compress,
            reduce_scatter="ring",
        )

    def train(self, num_steps: int, *, counts: bool) -> None:
        """Steps, timed to the arrival of all parameters."""
        for _ in range(num_steps):
            seed = self.num_steps * self.world.size + self.world.rank
            generator = torch.Generator().manual_seed(seed)
            shape = (NUM_IDS // NUM_FIELDS, NUM_FIELDS)
            ids = torch.randint(0, NUM_ROWS, shape, generator=generator)
            self.world.barrier()
            start = time.perf_counter()
            self.optimizer.zero_grad()
            self.model(ids).square().mean().backward()
            self.optimizer.step()
            self.optimizer.synchronize()
            self.num_steps += 1
            if counts:
                self.seconds.append(time.perf_counter() - start)

    def digest(self) -> str:
        """Of the parameters' bits."""
        parts = (param.detach().numpy().tobytes() for param in self.model.parameters())
        return hashlib.sha256(b"".join(parts)).hexdigest()


def main() -> None:
    """Print a line for each way of gathering and each setting."""
    torch.set_num_threads(1)
    inner = sys.argv[1] if len(sys.argv) > 1 else "sgd"
    world = dearmpi.connect()
    for gather in get_args(Gather):
        dense, sparse = (Method(world, gather, how, inner) for how in ("none", "nonzero"))
        for block in range(1 + NUM_BLOCKS):
            for method in (dense, sparse):
                method.train(BLOCK_STEPS if block else WARM_UP_STEPS, counts=bool(block))
        medians = {}
        for method in (dense, sparse):
            median = medians[method.compress] = statistics.median(method.seconds)
            traffic = method.optimizer.traffic
            sent = (traffic.reduced + traffic.gathered) / 1e6
            if world.is_root:
                print(f"{inner}, {gather}, {method.compress}: {median:.4f} s, {sent:.2f} MB sent")
        digests = set(world.all_gather_object((dense.digest(), sparse.digest())))
        is_equal = digests == {(dense.digest(), dense.digest())}
        if world.is_root:
            ratio = medians["none"] / medians["nonzero"]
            print(f"{ratio:.2f} x faster; {'equal bits' if is_equal else 'DIFFERENT bits'}")
        dense.optimizer.close()
        sparse.optimizer.close()


if __name__ == "__main__":
    main()
