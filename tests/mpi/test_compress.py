"""Sparse gradients over MPI: estimates as ranks believe, and whole ones to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import Compress, ReduceScatter
from tests.mpi.oracle import copies, fingerprint

ROWS, COLUMNS = 257, 300  # more elements than a bucket needs to be compressed; an odd number
STEPS = 5


@pytest.mark.ranks(2)
@pytest.mark.parametrize("compress", ["random-block", "topk", "block-topk"])
def test_adam_learns_from_estimates(world: World, compress: Compress) -> None:
    """Whole numbers are exact, so that sums of estimates must be equal to the bit."""
    model = nn.Linear(COLUMNS, ROWS, bias=False)
    inner = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = DistributedOptimizer(
        inner, model, world=world, compress=compress, density=0.05, error_feedback="ef21"
    )
    sent = []
    for step in range(STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step * world.size + world.rank)
        gradient = torch.randint(-8, 9, (ROWS, COLUMNS), generator=generator).float()
        (model.weight * gradient).sum().backward()
        optimizer.step()
        optimizer.synchronize()
        sent.append(optimizer.traffic.reduced)
    feedback = optimizer._built.engine.codecs.reduce[0].feedback  # type: ignore[attr-defined]
    estimate, total = feedback._residual, feedback._total
    summed = torch.tensor(world.all_reduce(estimate.tolist(), "sum"), dtype=torch.float32)
    first, last = optimizer.layout.buckets[0].shard_range(world.rank)
    assert torch.equal(total, summed[first:last])
    assert len(set(world.all_gather_text(fingerprint(copies(model))))) == 1
    assert sent[0] > 4 * sent[1] and len(set(sent[1:])) == 1  # the first step is dense
    optimizer.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("compress", "algorithm"),
    [
        ("random-block", "ring"),
        ("random-k", "exchange"),
        ("block-topk", "ring"),
        ("topk", "exchange"),
        ("nonzero", "ring"),
    ],
)
def test_all_of_a_gradient_has_the_bits_of_a_dense_one(
    world: World, compress: Compress, algorithm: ReduceScatter
) -> None:
    """With density 1; ``topk`` adds in the order of ranks, as an exchange does."""
    found = []
    for how in ("none", compress):
        model = nn.Linear(COLUMNS, ROWS, bias=False)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            world=world,
            compress=how,
            density=1.0 if how not in ("none", "nonzero") else None,
            reduce_scatter=algorithm,
        )
        for step in range(2):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step * world.size + world.rank)
            (model.weight * torch.randn(ROWS, COLUMNS, generator=generator)).sum().backward()
            found.append(optimizer.gradients()["weight"].clone())
            optimizer.step()
        optimizer.close()
    assert all(map(torch.equal, found[:2], found[2:]))
