"""Checks on a network where time stands still: what is under way is there for nobody."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.api.collectives import Buffer
from dearmpi.comm.world import World
from dearmpi.errors import MismatchError, UsageError
from tests.codes import raises
from tests.fakes import FakeClock, FakeHub
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill


class Reader(nn.Module):
    """Computes with a parameter of another module, by a reference that nobody can watch."""

    def __init__(self, param: Tensor) -> None:
        super().__init__()
        self.held = [param]

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.held[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.reader = Reader(self.first.weight)
        fill(self)

    def forward(self, inputs: Tensor) -> Any:
        return self.last(self.reader(inputs))


def standing_hub() -> tuple[FakeHub, FakeClock]:
    """Two ranks on a network that brings nothing as long as the clock stands."""
    clock = FakeClock()
    return FakeHub(2, clock=clock.now, seconds=lambda label, nbytes: 1.0), clock


def assert_reader_is_named(model: Model) -> None:
    with raises(UsageError, "read-of-stale-parameter", "module reader", "first"):
        model(torch.ones(2, 8))


@pytest.mark.parametrize("check_every", [1, 1000])
@pytest.mark.parametrize("eager", [False, True])
def test_a_module_that_reads_in_the_next_forward_what_has_not_come_is_named(
    eager: bool, check_every: int
) -> None:
    hub, clock = standing_hub()

    def rank(world: World) -> None:
        model = Model()
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            world=world,
            check_every=check_every,
            eager=eager,
        )
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        assert_reader_is_named(model)
        world.barrier()
        clock.advance(math.inf)
        optimizer.close()

    run_ranks(2, rank, hub=hub)


def test_backprop_goes_on_through_frozen_parameters_of_a_bucket_under_way() -> None:
    hub, clock = standing_hub()

    def rank(world: World) -> None:
        model = nn.Sequential(*(nn.Linear(n, 4, bias=False) for n in (32, 4, 4)))
        fill(model)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            world=world,
            check_every=1000,
            eager=True,
            bucket_cap_mb=300 / 2**20,
        )
        assert [bucket.names for bucket in optimizer.layout][1:] == [("1.weight", "2.weight")]
        model[1].requires_grad_(False)
        inputs = torch.ones(2, 32, requires_grad=True)
        model(inputs).square().mean().backward()
        assert inputs.grad is not None and inputs.grad.isfinite().all()
        world.barrier()
        clock.advance(math.inf)
        optimizer.step()
        optimizer.close()

    run_ranks(2, rank, hub=hub)


def test_a_parameter_that_this_rank_did_not_use_may_not_be_read_early_either() -> None:
    hub, clock = standing_hub()

    def rank(world: World) -> None:
        model = Model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world, check_every=1000)
        used = model if world.rank == 0 else model.last
        used(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        assert_reader_is_named(model)
        world.barrier()
        clock.advance(math.inf)
        optimizer.close()

    run_ranks(2, rank, hub=hub)


class Scaled(nn.Module):
    """By one number, whose stride is another tensor's."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(6)[::2][:1])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.factor * inputs


def test_replicas_of_one_element_and_any_stride_are_compared() -> None:
    def rank(world: World) -> float:
        model = Scaled()
        inner = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = DistributedOptimizer(inner, model, world=world, check_every=1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1,), world.rank + 1.0)).sum().backward()
            optimizer.step()
        optimizer.close()
        return model.factor.item()

    assert run_ranks(2, rank) == [-0.5, -0.5]


def train_drifting(world: World, *, drifts: int | None = None) -> str:
    """Three compared steps, after the first of which a rank changes a weight; what is then told."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fill(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, model, world=world, check_every=1, gather="gradients")
    told = ""
    try:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.synchronize()
            if world.rank == drifts:
                with torch.no_grad():
                    model[1].bias.add_(1.0)
    except MismatchError as error:
        told = str(error)
    optimizer.close()
    return told


def test_how_much_is_told_of_replicas_does_not_grow_with_the_number_of_ranks() -> None:
    def told(size: int) -> set[str]:
        def name(buffer: Buffer) -> str:
            return f" of {buffer.numel()} numbers" if buffer.element_size() == 8 else ""

        hub = FakeHub(size, name=name)
        assert run_ranks(size, train_drifting, hub=hub) == [""] * size
        return {record.label for record in hub.records if record.label.endswith("numbers")}

    assert told(2) == told(5) != set()


@pytest.mark.parametrize("drifts", [0, 2, 3])
def test_of_replicas_that_drift_apart_the_first_two_are_named_on_all_ranks(drifts: int) -> None:
    texts = run_ranks(4, lambda world: train_drifting(world, drifts=drifts))
    assert len(set(texts)) == 1
    found = re.search(r"2, 1\.bias differs .*hash (\w+) on rank 0, (\w+) on rank (\d)\.", texts[0])
    assert found is not None, texts[0]
    assert found[1] != found[2] and int(found[3]) == max(1, drifts)
