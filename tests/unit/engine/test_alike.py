"""Ranks that no longer train alike are told so in the next step, all of them."""

from __future__ import annotations

import copy
import re
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.errors import MismatchError, ReplicaMismatchError
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill

State = dict[str, Any]


class Trained:
    """A model that takes steps."""

    def __init__(self, world: World) -> None:
        self.model = nn.Linear(3, 3)
        fill(self.model)
        adam = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.optimizer = DistributedOptimizer(adam, self.model, world=world)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 3)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.synchronize()

    def saved(self) -> State:
        return copy.deepcopy(self.optimizer.state_dict())


def told_after(size: int, load: Any) -> list[str]:
    """Train, call ``load(trained, rank, state)``, train on; what each rank is told then."""

    def train(world: World) -> str:
        trained = Trained(world)
        trained.step()
        earlier = trained.saved()
        trained.step()
        load(trained, world.rank, earlier)
        with pytest.raises(ReplicaMismatchError) as caught:
            trained.step()
            trained.optimizer.close()  # until every roll call is answered
        assert caught.value.exit_code == 4
        return str(caught.value)

    return run_ranks(size, train)


@pytest.mark.parametrize("loaders", [{0}, {1, 2}])
def test_loading_on_some_ranks_is_told_on_all(loaders: set[int]) -> None:
    def load(trained: Trained, rank: int, state: State) -> None:
        if rank in loaders:
            trained.optimizer.load_state_dict(state)

    for text in told_after(3, load):
        assert "some ranks have called load_state_dict() 0 times and some 1 times" in text


@pytest.mark.parametrize("differs", ["steps", "lr", "values"])
def test_loading_another_state_is_told_on_all(differs: str) -> None:
    def load(trained: Trained, rank: int, state: State) -> None:
        if rank == 1 and differs == "lr":
            state["param_groups"][0]["lr"] = 0.2
        elif rank == 1 and differs == "values":
            state["state"][0]["exp_avg"].view(-1)[-1] += 1e-3
        elif rank == 1:
            for entries in state["state"].values():
                entries["step"] += 1
        trained.optimizer.load_state_dict(state)

    for text in told_after(2, load):
        assert "states that differ" in text and "load the same state on every rank" in text


@pytest.mark.parametrize("factor", [0.997, 0.9, 0.5, 0.1, 0.0])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_a_scheduler_that_looks_at_its_own_loss_is_told_on_all(
    factor: float, as_tensor: bool
) -> None:
    def load(trained: Trained, rank: int, state: State) -> None:
        rate = 0.1 * (factor if rank == 2 else 1.0)
        trained.optimizer.param_groups[0]["lr"] = torch.tensor(rate) if as_tensor else rate

    for rank, text in enumerate(told_after(3, load)):
        own = 0.1 * (factor if rank == 2 else 1.0)
        assert f"learning rate of param group 0 is {own:g} on this rank" in text
        found = re.search(r"from about (\S+) to (\S+) over all", text)
        assert found is not None
        assert [float(rate) for rate in found.groups()] == pytest.approx([0.1 * factor, 0.1], 1e-3)


# Of the first pair one is on each side of the middle between two numbers that may be told.
BETWEEN = 2 ** (-1500.5 / 500)
ROUNDED = [(BETWEEN * (1 - 1e-6), BETWEEN * (1 + 1e-6)), (0.1, 0.1 * (1 + 1e-15))]


@pytest.mark.parametrize("rates", [*ROUNDED, (1e-20, 1e-19), (1e9, 1e8)])
def test_learning_rates_that_differ_by_a_rounding_or_beyond_any_use_are_not(
    rates: tuple[float, float],
) -> None:
    def train(world: World) -> None:
        trained = Trained(world)
        trained.optimizer.param_groups[0]["lr"] = rates[world.rank]
        trained.step()
        trained.optimizer.close()

    run_ranks(2, train)


def test_the_same_state_goes_through_any_number_of_loads_and_layouts() -> None:
    def train(world: World) -> float:
        trained = Trained(world)
        trained.step()
        state = trained.saved()
        for _ in range(2):
            trained.optimizer.load_state_dict(state)
            trained.step()
            trained.optimizer.fuse(0.00001)
            trained.step()
        trained.optimizer.close()
        return float(trained.model.weight.detach().sum())

    assert len(set(run_ranks(2, train))) == 1


def step_in_epochs(world: World, *, by_own_steps: bool) -> None:
    """Two epochs, of which rank 1 has more batches."""
    trained = Trained(world)
    scheduler = ExponentialLR(trained.optimizer, 0.98)
    for _ in range(2):
        with trained.optimizer.join():
            for _ in range(2 + world.rank):
                trained.model(torch.ones(1, 3)).square().mean().backward()
                trained.optimizer.step()
                if by_own_steps:
                    scheduler.step()
        if not by_own_steps:
            scheduler.step()
    trained.optimizer.close()


def test_ranks_that_have_stepped_their_schedulers_unequally_in_join_are_told_so() -> None:
    """Once they train together again: one that has joined takes over the others' options."""

    def rank(world: World) -> str:
        with pytest.raises(ReplicaMismatchError) as caught:
            step_in_epochs(world, by_own_steps=True)
        return str(caught.value)

    for text in run_ranks(2, rank):
        assert "learning rate of param group 0 is 0.09" in text
        assert "step equally often, by a count that all share" in text


def test_schedulers_stepped_by_a_count_that_all_share_are_alike_in_join() -> None:
    run_ranks(2, lambda world: step_in_epochs(world, by_own_steps=False))


def test_join_on_some_ranks_is_told_on_all() -> None:
    """Its numbers would meet those of the others' steps."""

    def train(world: World) -> str:
        trained = Trained(world)
        trained.step()
        with pytest.raises(MismatchError) as caught:
            if world.is_root:
                with trained.optimizer.join():
                    trained.step()
            else:
                world.mean(0.5)
        return str(caught.value)

    for text in run_ranks(2, train):
        assert "optimizer.join()" in text and "world.mean()" in text
        assert "with optimizer.join(): on every rank" in text


def test_checks_that_the_environment_asks_for_on_some_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would meet the others' step agreement."""
    steps = {"rank-0": 0, "rank-1": 1}  # the environment is the same for all threads
    found = lambda _: steps[threading.current_thread().name]  # noqa: E731
    monkeypatch.setattr(EngineConfig, "steps_between_checks", property(found))
    with raises(MismatchError, "ranks-built-differently", "check_every=1", "check_every=0"):
        run_ranks(2, Trained)
