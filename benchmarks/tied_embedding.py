"""How long does an iteration take whose largest gradient is a bucket by itself?

Usage: mpirun -n 2 python benchmarks/tied_embedding.py [ROWS] [WIDTH]

An embedding of ROWS x WIDTH that is the decoder as well, as BERT-Base has one, with four layers
between and a batch of 64 words, on one core of each rank. Prints the median of ten iterations.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

from dearmpi import DistributedOptimizer, connect

_WARMUP, _COUNTED, _WORDS = 4, 10, 64


class Tied(nn.Module):
    """Scores for each of ``rows`` words."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words)
        for layer in self.layers:
            hidden = functional.gelu(layer(hidden))
        return torch.matmul(hidden, self.embedding.weight.T)


def main() -> None:
    rows, width = map(int, [*sys.argv[1:], *("30522", "768")[len(sys.argv) - 1 :]])
    world = connect()
    torch.manual_seed(world.rank)
    torch.set_num_threads(1)
    model = Tied(rows, width)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = DistributedOptimizer(inner, model, world=world)
    words = torch.randint(0, rows, (_WORDS,))
    times_s = []
    for _ in range(_WARMUP + _COUNTED):
        start = time.perf_counter()
        optimizer.zero_grad()
        functional.cross_entropy(model(words), words).backward()
        optimizer.step()
        times_s.append(time.perf_counter() - start)
    optimizer.close()
    if world.rank == 0:
        median_s = statistics.median(times_s[_WARMUP:])
        sizes_mb = [bucket.nbytes / 1e6 for bucket in optimizer.layout]
        print(
            f"{median_s * 1e3:.1f} ms; {len(sizes_mb)} buckets, {max(sizes_mb):.1f} MB the largest"
        )


if __name__ == "__main__":
    main()
