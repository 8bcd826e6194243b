"""Which reduce-scatters ``auto`` may choose from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.ranks import run_ranks
from dearmpi.comm.world import World


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float32, True), (torch.bfloat16, False), (torch.complex64, False)]
)
def test_mpis_own_sum_is_no_choice_where_it_cannot_add_every_bucket(
    dtype: torch.dtype, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice is made with the largest bucket, and holds for the smallest."""
    offers = []

    def choose(*_: Any, can_be_native: bool, **__: Any) -> str:
        offers.append(can_be_native)
        return "ring"

    monkeypatch.setattr("dearmpi.engine.assembly.fastest_reduce_scatter", choose)

    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(50, 50), nn.Linear(3, 2, dtype=dtype))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        DistributedOptimizer(inner, model, world=world, reduce_scatter="auto").close()

    run_ranks(2, rank)
    assert offers == [allowed, allowed]


def test_what_auto_has_found_stays_where_buckets_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring it anew would stop training for as long."""
    choices = []

    def choose(*_: Any, **__: Any) -> str:
        choices.append("exchange")
        return "exchange"

    monkeypatch.setattr("dearmpi.engine.assembly.fastest_reduce_scatter", choose)

    def rank(world: World) -> int:
        model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world, reduce_scatter="auto")
        optimizer.fuse(0.01)
        optimizer.close()
        return len(optimizer.layout)

    assert run_ranks(2, rank) == [2, 2]
    assert len(choices) == 2, "each rank asked once, for the first buckets"
