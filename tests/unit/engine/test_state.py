"""Optimizer state: plain torch's form, whatever the world size, the gather and the optimizer."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import Gather
from dearmpi.errors import CheckpointError, UsageError
from tests.codes import raises
from tests.combinations import turns_of
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill
from tests.mpi.oracle import OPTIMIZERS, Case, Outcome, Training, assert_same, copies

STEPS = 3


def resume(case: Case, world: World | None, start: Outcome | None) -> Outcome:
    """Train for ``STEPS`` steps from ``start``, or from the beginning."""
    with Training(case, world) as training:
        first = 0
        if start is not None:
            first = STEPS
            training.model.load_state_dict(start.parameters)
            training.optimizer.load_state_dict(copy.deepcopy(start.optimizer))
        for step in range(first, first + STEPS):
            training.step(step)
        return training.outcome()


def resume_on(size: int, case: Case, start: Outcome | None) -> Outcome:
    """The same on ``size`` ranks, or with plain torch for 0."""
    if size == 0:
        return resume(case, None, start)
    return run_ranks(size, lambda world: resume(case, world, start))[-1]


@turns_of(optimizer=[name for name in OPTIMIZERS if name != "muon"], model=["dense", "branches"])
def test_training_goes_on_at_any_world_size(optimizer: str, model: str) -> None:
    gather = "gradients" if optimizer == "adafactor" else "parameters"
    case = Case(optimizer=optimizer, model=model, gather=gather, groups=2)
    expected = resume_on(0, case, resume_on(0, case, None))
    start = None
    for size in (3, 2):
        start = resume_on(size, case, start)
    assert start is not None
    assert_same(start, expected)


@pytest.mark.parametrize("sizes", [(0, 3), (2, 0), (1, 4), (5, 1), (4, 3)])
def test_state_moves_between_plain_torch_and_any_world_size(sizes: tuple[int, int]) -> None:
    case = Case(optimizer="amsgrad", model="image")
    expected = resume_on(0, case, resume_on(0, case, None))
    assert_same(resume_on(sizes[1], case, resume_on(sizes[0], case, None)), expected)


@turns_of(
    gathers=[("parameters", "gradients"), ("gradients", "parameters")],
    model=["dense", "mixed", "text"],
)
def test_state_moves_between_ways_to_gather(gathers: tuple[str, str], model: str) -> None:
    first, second = (Case(optimizer="adam", model=model, gather=gather) for gather in gathers)
    expected = resume_on(0, second, resume_on(0, first, None))
    assert_same(resume_on(2, second, resume_on(3, first, None)), expected)


class Cubic(nn.Module):
    """Nothing but scalar parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.coefficients = nn.ParameterList(torch.tensor(0.5 * power) for power in range(4))

    def forward(self, inputs: Tensor) -> Any:
        terms = [c * inputs**power for power, c in enumerate(self.coefficients)]
        return (sum(terms) - inputs.sin()).square().mean()


@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "sgd", "asgd", "nadam"])
def test_scalar_parameters_keep_their_state_when_resumed(optimizer: str) -> None:
    """A state of shape () is one value per element there, but a counter anywhere else."""

    def train(world: World | None, state: Any, num_steps: int) -> tuple[list[float], Any]:
        model = Cubic()
        inner = OPTIMIZERS[optimizer](model.parameters())
        wrapped: Any = inner
        if world is not None:
            wrapped = DistributedOptimizer(inner, model, world=world, bucket_cap_mb=1.0)
        if state is not None:
            wrapped.load_state_dict(copy.deepcopy(state))
        for step in range(num_steps):
            wrapped.zero_grad()
            model(torch.linspace(-1, 1 + step, 5)).backward()
            wrapped.step()
        found = wrapped.state_dict()
        return [c.item() for c in model.coefficients], found

    middle = run_ranks(3, lambda world: train(world, None, 2))[1][1]
    expected = train(None, train(None, None, 2)[1], 2)
    for found in run_ranks(2, lambda world: train(world, middle, 2)):
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        for index, entries in expected[1]["state"].items():
            for key, value in entries.items():
                assert torch.as_tensor(found[1]["state"][index][key]).shape == torch.Size([])
                assert float(found[1]["state"][index][key]) == pytest.approx(float(value), rel=1e-4)


@pytest.mark.parametrize(("number", "name"), [(0, "scale"), (2, "layers.0.bias")])
def test_state_of_another_shape_is_refused_on_every_rank(number: int, name: str) -> None:
    """Also where none of its elements belong."""
    case = Case(optimizer="adam")
    start = resume_on(0, case, None)
    start.optimizer["state"][number]["exp_avg"] = torch.zeros(2, 2)

    def rank(world: World) -> str:
        training = Training(case, world)
        with pytest.raises(CheckpointError) as caught:
            training.optimizer.load_state_dict(start.optimizer)
        return str(caught.value)

    for message in run_ranks(3, rank):
        assert f"exp_avg of parameter {name} has shape (2, 2)" in message


def test_each_rank_keeps_its_share_of_the_state_only() -> None:
    """Which is what gather="parameters" saves."""

    def count(world: World) -> int:
        with Training(Case(optimizer="adam"), world) as training:
            training.step(0)
            training.optimizer.synchronize()
            return sum(
                value.numel()
                for update in training.optimizer._built.updates.of_buckets
                for run in update.runs
                for value in update.state_of(run).values()
                if value.dim()
            )

    whole = 2 * sum(p.numel() for p in Training(Case()).model.parameters())
    counts = run_ranks(4, count)
    assert sum(counts) == whole
    assert max(counts) < 0.3 * whole


def test_loading_without_state_starts_anew() -> None:
    case = Case(optimizer="adam")

    def rank(world: World) -> Outcome:
        with Training(case, world) as training:
            start = training.optimizer.state_dict()
            parameters = training.outcome().parameters
            training.step(5)
            training.model.load_state_dict(parameters)
            training.optimizer.load_state_dict(start)
            for step in range(STEPS):
                training.step(step)
            return training.outcome()

    for outcome in run_ranks(2, rank):
        assert_same(outcome, resume(case, None, None))


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_the_wrapped_optimizer_goes_on_after_close(gather: Any) -> None:
    """By itself where every rank has all of the state, and else from a state dict."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()

    def rank(world: World | None) -> list[Any]:
        model = nn.Linear(3, 2)
        fill(model)
        inner = torch.optim.Adam(model.parameters(), lr=0.1)
        if world is None:
            train(model, inner)
        else:
            optimizer = DistributedOptimizer(inner, model, world=world, gather=gather)
            train(model, optimizer)
            saved = optimizer.state_dict()
            optimizer.close()
            assert str(optimizer.state_dict()) == str(saved)
            if gather == "parameters":
                inner.load_state_dict(saved)
        train(model, inner)
        return [param.tolist() for param in model.parameters()]

    alone = rank(None)
    for found in run_ranks(2, rank):
        for values, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(torch.tensor(values), torch.tensor(expected))


@pytest.mark.parametrize("shards", ["even", "whole"])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_wrapped_optimizer_that_begins_without_its_state_says_so(
    shards: Any, again: bool, momentum: float
) -> None:
    """After close(), by itself or in another DistributedOptimizer, if it had any state."""

    def rank(world: World) -> None:
        model = nn.Linear(30, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

        def step(optimizer: torch.optim.Optimizer) -> None:
            model(torch.ones(1, 30)).sum().backward()
            optimizer.step()

        optimizer = DistributedOptimizer(inner, model, world=world, shards=shards)
        step(optimizer)
        optimizer.close()
        if again:
            DistributedOptimizer(inner, model, world=world, shards=shards).close()
        else:
            step(inner)
            step(inner)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, rank)
    told = [each for each in caught if "begins without its state" in str(each.message)]
    assert len(told) == (2 if momentum else 0), caught


class CountedClones(TorchFunctionMode):
    """Counts the clones that the thread makes."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is Tensor.clone
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_loading_copies_each_tensor_once_however_many_buckets_there_are(gather: str) -> None:
    case = Case(optimizer="adam", gather=gather, cap_mb=1e-5)
    start = resume_on(0, case, None).optimizer

    def rank(world: World) -> tuple[int, int]:
        with Training(case, world) as training, CountedClones() as clones:
            training.optimizer.load_state_dict(start)
            return clones.count, len(training.optimizer.layout)

    num_tensors = sum(len(entries) for entries in start["state"].values())
    for num_clones, num_buckets in run_ranks(2, rank):
        assert num_buckets > 2
        assert num_clones <= num_tensors


def test_neighbours_of_which_one_has_none_for_its_momentum_are_loaded() -> None:
    """As a parameter has that was stepped without momentum."""

    def train(world: World | None) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        fill(model)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer: Any = inner
        if world is not None:
            optimizer = DistributedOptimizer(inner, model, world=world, bucket_cap_mb=1.0)
        state = optimizer.state_dict()
        state["state"] = {
            index: {"momentum_buffer": None if index % 2 else torch.ones_like(param)}
            for index, param in enumerate(model.parameters())
        }
        optimizer.load_state_dict(state)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
        return list(copies(model).values())

    expected = train(None)
    for found in run_ranks(2, train):
        torch.testing.assert_close(found, expected)


class FilledWhenMade(torch.optim.Optimizer):
    """Adagrad whose constructor makes the state, as torch's own did up to 2.11."""

    def __init__(self, params: Any, lr: float = 0.1, start: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "start": start})
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {
                    "step": torch.tensor(0.0),
                    "sum": torch.full_like(param, group["start"]),
                }

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] += 1
                state["sum"].addcmul_(param.grad, param.grad)
                rate = group["lr"] / (1.0 + 0.1 * (float(state["step"]) - 1.0))
                param.addcdiv_(param.grad, state["sum"].sqrt(), value=-rate)


def take_step(model: nn.Module, optimizer: Any, world: World | None, step: int) -> None:
    """On this rank's samples of the batch of ``step``; without a world, on all of them."""
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step)).double()
    optimizer.zero_grad()
    model(inputs if world is None else inputs[world.rank :: world.size]).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_an_optimizer_that_has_its_state_from_the_start_trains_as_alone(gather: Gather) -> None:
    def train(world: World | None) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        fill(model)
        optimizer: Any = FilledWhenMade(model.parameters())
        if world is not None:
            optimizer = DistributedOptimizer(optimizer, model, world=world, gather=gather)
        for step in range(4):
            take_step(model, optimizer, world, step)
        return [param.detach().clone() for param in model.parameters()]

    alone = train(None)
    for trained in run_ranks(2, train):
        for param, wanted in zip(trained, alone, strict=True):
            torch.testing.assert_close(param, wanted, rtol=1e-12, atol=1e-12)


class Labelled(torch.optim.Optimizer):
    """Momentum in whose state stand a text and None as well."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(rule="heavy ball", nothing=None, sum=torch.zeros_like(param))
                state["sum"].mul_(0.9).add_(param.grad)
                rate = group["lr"] if state["rule"] == "heavy ball" else 0.0
                param.add_(state["sum"], alpha=-rate)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_texts_in_the_state_are_those_that_were_saved(gather: Gather) -> None:
    def train(world: World | None) -> list[Tensor]:
        model = nn.Linear(3, 5).double()
        fill(model)
        optimizer: Any = Labelled(model.parameters())
        if world is not None:
            optimizer = DistributedOptimizer(optimizer, model, world=world, gather=gather)
        for step in range(4):
            take_step(model, optimizer, world, step)
            if world is not None and step == 1:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer.load_state_dict(saved)
                again = optimizer.state_dict()["state"]
                assert again[0]["rule"] == "heavy ball" and again[0]["nothing"] is None
        return [param.detach().clone() for param in model.parameters()]

    alone = train(None)
    for trained in run_ranks(2, train):
        torch.testing.assert_close(trained, alone)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_the_wrapped_optimizers_own_state_dict_is_refused_until_close(gather: Gather) -> None:
    def train(world: World) -> None:
        model = nn.Linear(3, 5)
        wrapped = torch.optim.Adam(model.parameters())
        optimizer = DistributedOptimizer(wrapped, model, world=world, gather=gather)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        with raises(UsageError, "saved-without-state", "of the wrapped Adam"):
            wrapped.state_dict()
        with raises(UsageError, "saved-without-state", "read state of the DistributedOptimizer"):
            wrapped.state[model.weight]["exp_avg"]
        assert type(copy.deepcopy(wrapped.state)) is defaultdict
        whole = optimizer.state_dict()
        assert len(whole["state"]) == 2 and optimizer.local_state()
        optimizer.close()
        wrapped.load_state_dict(whole)
        assert len(wrapped.state_dict()["state"]) == 2
        assert "exp_avg" in wrapped.state[model.weight]

    run_ranks(2, train)
