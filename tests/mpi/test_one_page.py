"""The one-page example gives the numbers of the engine."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import dearmpi
from dearmpi.comm.world import World

_PAGE = Path(__file__).parents[2] / "examples" / "dear_in_one_page.py"
_NUM_STEPS = 5


def _load_page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dear_in_one_page", _PAGE)
    assert spec is not None and spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    return page


def _train(model: nn.Sequential, optimizer: object, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(_NUM_STEPS):
        inputs = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        model(inputs).square().mean().backward()
        optimizer.step()  # type: ignore[attr-defined]
        if hasattr(optimizer, "zero_grad"):
            optimizer.zero_grad()


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("num_buckets", [1, 3])
def test_the_page_trains_as_the_engine_does(world: World, num_buckets: int) -> None:
    from mpi4py import MPI

    torch.manual_seed(world.rank)  # only rank 0's parameters count
    layers = [nn.Linear(5, 5) for _ in range(4)]
    own = nn.Sequential(*layers).double()
    engine = copy.deepcopy(own)
    optimizer = dearmpi.DistributedOptimizer(
        torch.optim.Adam(engine.parameters(), lr=0.1), engine, world=world, bucket_cap_mb=0.0001
    )
    _train(engine, optimizer, world.rank)
    optimizer.close()
    before = layers[0].weight.detach().clone()
    page = _load_page().DearOptimizer(
        own, lambda shards: torch.optim.Adam(shards, lr=0.1), MPI.COMM_WORLD, num_buckets
    )
    _train(own, page, world.rank)
    page.synchronize()
    assert not torch.equal(layers[0].weight, before)
    for one, other in zip(own.parameters(), engine.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
