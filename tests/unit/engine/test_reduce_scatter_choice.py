"""Which reduce-scatters ``auto`` may choose from."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.api.collectives import Request
from dearmpi.comm.world import World
from dearmpi.config import ReduceScatter
from dearmpi.device.routes import SettledBuffer
from dearmpi.tune.device_probe import OPERATIONS, ProbeVerdict
from tests.fakes import FakeCollectives
from tests.fakes.ranks import run_ranks
from tests.lazy_device import LazyDevice, put_on


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float32, True), (torch.bfloat16, False), (torch.complex64, False)]
)
def test_mpis_own_sum_is_no_choice_where_it_cannot_add_every_bucket(
    dtype: torch.dtype, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice is made with the largest bucket, and holds for the smallest."""
    offers = []

    def choose(*_: Any, library_can_add: bool, **__: Any) -> str:
        offers.append(library_can_add)
        return "ring"

    monkeypatch.setattr("dearmpi.device.route_choice.select_reduce_scatter", choose)

    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(50, 50), nn.Linear(3, 2, dtype=dtype))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        DistributedOptimizer(inner, model, world=world, reduce_scatter="auto").close()

    run_ranks(2, rank)
    assert offers == [allowed, allowed]


def test_a_bucket_that_is_frozen_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the largest, and would get memory for gradients that never come."""
    numels = []

    def choose(_: World, buffer: Tensor, **__: Any) -> str:
        numels.append(buffer.numel())
        return "ring"

    monkeypatch.setattr("dearmpi.device.route_choice.select_reduce_scatter", choose)

    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(50, 50), nn.Linear(3, 2, bias=False))
        model[0].requires_grad_(False)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        DistributedOptimizer(inner, model, world=world, reduce_scatter="auto").close()

    run_ranks(2, rank)
    assert numels == [6, 6]


@pytest.mark.parametrize("direct", [False, True])
def test_auto_tries_the_way_that_a_devices_gradients_take(
    direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, tried, start = LazyDevice(), set(), FakeCollectives.start_reduce_scatter
    put_on(monkeypatch, device)
    verdicts = (
        tuple(ProbeVerdict(operation, works=True) for operation in OPERATIONS) if direct else ()
    )
    monkeypatch.setattr("dearmpi.device.route_choice.known_verdicts", lambda: verdicts)

    def note(self: Any, buffer: Any, algorithm: Any, **options: Any) -> Request:
        tried.add((type(buffer), algorithm))
        return start(self, buffer, algorithm, **options)

    monkeypatch.setattr(FakeCollectives, "start_reduce_scatter", note)

    def rank(world: World) -> None:
        model = nn.Linear(5, 5)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        DistributedOptimizer(inner, model, world=world, reduce_scatter="auto").close()

    run_ranks(2, rank)
    kind = SettledBuffer if direct else Tensor
    assert tried == {(kind, algorithm) for algorithm in get_args(ReduceScatter)}
    assert (device.num_copies > 0) != direct


def test_what_auto_has_found_stays_where_buckets_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring it anew would stop training for as long."""
    choices = []

    def choose(*_: Any, **__: Any) -> str:
        choices.append("exchange")
        return "exchange"

    monkeypatch.setattr("dearmpi.device.route_choice.select_reduce_scatter", choose)

    def rank(world: World) -> int:
        model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world, reduce_scatter="auto")
        optimizer.fuse(0.01)
        optimizer.close()
        return len(optimizer.layout)

    assert run_ranks(2, rank) == [2, 2]
    assert len(choices) == 2, "each rank asked once, for the first buckets"
