"""Ranks that wait for a step which never comes know so; one that comes late is waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer
from dearmpi.comm import world
from dearmpi.comm.api import safe_output
from dearmpi.comm.watchdog.watchdog import StallLimits
from dearmpi.comm.world import World
from dearmpi.errors import StallError
from tests.codes import raises
from tests.fakes.ranks import run_ranks

LIMIT_S = 60.0  # far beyond what any of this takes


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = StallLimits(warning_s=0.3, abort_s=12.0)
    monkeypatch.setattr(world, "StallLimits", lambda: limits)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set when a rank has told what it waits for."""
    event = threading.Event()
    monkeypatch.setattr(safe_output, "write", lambda text: event.set())
    yield event


class Training:
    """A small model; ``backward`` and ``step`` as a script has them."""

    def __init__(self, world: World, **settings: Any) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = DistributedOptimizer(inner, self.model, world=world, **settings)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(3, 4)).square().mean().backward()

    def iterate(self) -> None:
        self.backward()
        self.optimizer.step()


@pytest.mark.usefixtures("reported")
def test_a_rank_that_leaves_before_its_step_is_named() -> None:
    def train(world: World) -> None:
        training = Training(world)
        training.iterate()
        training.backward()
        if world.rank == 1:
            world.leave()  # as by a break where the loss is not finite
        training.optimizer.step()
        training.optimizer.synchronize()

    with raises(
        StallError, "ranks-out-of-step", "but rank 1 has ended after 2 backprops"
    ) as caught:
        run_ranks(2, train)
    assert "which have taken 2 and 1 steps, have unequal numbers of batches" in str(caught.value)


@pytest.mark.usefixtures("reported")
def test_a_gradient_that_one_rank_reads_before_all_clip_is_found() -> None:
    """It waits for the other's step, and the other for its norm."""

    def train(world: World) -> None:
        training = Training(world, gather="gradients")
        training.optimizer.keep_gradients()
        training.iterate()
        training.backward()
        if world.rank == 1:
            gradient = next(training.model.parameters()).grad
            assert gradient is not None
            gradient.sum()
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)

    with raises(StallError, "ranks-out-of-step", "not both read param.grad"):
        run_ranks(2, train)


@pytest.mark.usefixtures("reported")
def test_a_collective_call_of_one_rank_before_its_step_is_found() -> None:
    """Rank 0 waits for its step, and it for rank 0."""

    def train(world: World) -> None:
        training = Training(world)
        training.backward()
        if world.rank == 1:
            world.barrier()
        training.optimizer.step()
        training.optimizer.synchronize()

    with raises(StallError, "ranks-out-of-step", "collective operations in different order"):
        run_ranks(2, train)


@pytest.mark.usefixtures("reported")
@pytest.mark.parametrize("ways", ["one", "two", "two on groups"])
def test_gradients_that_one_rank_drops_are_found(ways: str) -> None:
    """It waits for the others' next backward, and they for its step."""

    def train(world: World) -> None:
        on = world
        if ways == "two on groups":
            group = world.split(0)
            assert group is not None
            on = group
        trainings = [Training(world)] if ways == "one" else [Training(world), Training(on)]
        for training in trainings:
            training.iterate()
        for training in trainings:
            training.backward()
        for training in trainings:
            if world.rank != 1 or training is not trainings[-1]:
                training.optimizer.step()
        for training in trainings[::-1]:
            training.backward()
            training.optimizer.clip_grad_norm_(1.0)

    with raises(StallError, "ranks-out-of-step", "not each taken a step") as caught:
        run_ranks(2, train)
    assert "by zero_grad() without step()" in str(caught.value)


@pytest.mark.usefixtures("reported")
def test_a_rank_that_has_closed_its_optimizer_is_found() -> None:
    """Others that still train wait in vain; where all have closed, nothing of it is kept long."""

    def train(world: World) -> None:
        for _ in range(40):
            Training(world).optimizer.close()
        assert len(world._watchdog.status().trainings) < 40
        training = Training(world)
        training.iterate()
        if world.rank == 1:
            training.optimizer.close()
            world.barrier()
        training.iterate()
        training.optimizer.synchronize()

    with raises(StallError, "ranks-out-of-step"):
        run_ranks(2, train)


@pytest.mark.parametrize("where", ["batch", "step"])
def test_a_rank_that_comes_late_to_its_step_is_waited_for(
    where: str, reported: threading.Event
) -> None:
    def train(world: World) -> list[float]:
        torch.manual_seed(0)
        training = Training(world)
        training.iterate()
        if world.rank == 1 and where == "batch":
            assert reported.wait(LIMIT_S)
        training.backward()
        world.barrier()  # such as for the mean loss
        if world.rank == 1 and where == "step":
            assert reported.wait(LIMIT_S)
        training.optimizer.step()
        training.optimizer.synchronize()
        return [value for param in training.model.parameters() for value in param.flatten()]

    one, other = run_ranks(2, train)
    assert one == other


def test_ranks_that_have_joined_wait_for_a_slow_one(reported: threading.Event) -> None:
    def train(world: World) -> None:
        training = Training(world)
        with training.optimizer.join():
            for batch in range(4 if world.rank == 1 else 1 + world.rank):
                if world.rank == 1 and batch == 3:
                    assert reported.wait(LIMIT_S)  # both others have joined
                training.iterate()
        training.iterate()
        world.leave()

    run_ranks(3, train)
