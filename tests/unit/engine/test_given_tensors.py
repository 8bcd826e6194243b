"""An optimizer is given pieces of buckets, not the model's parameters: what depends on the
difference trains as alone, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill

GATHERS = pytest.mark.parametrize("gather", ["parameters", "gradients"])
Make = Callable[[Any], torch.optim.Optimizer]


class Descent(torch.optim.Optimizer):
    """Gradient descent, whose ways to change a parameter are several."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.change(param, param.grad, group["lr"])

    def change(self, param: Tensor, grad: Tensor, rate: float) -> None:
        """Change one parameter."""
        param.sub_(rate * grad)


class Moving(Descent):
    def change(self, param: Tensor, grad: Tensor, rate: float) -> None:
        param.data = param.data - rate * grad


class KeepingGradients(Descent):
    """Goes along the difference of two gradients."""

    def change(self, param: Tensor, grad: Tensor, rate: float) -> None:
        param.sub_(rate * (grad - self.state[param].get("previous", 0.0)))
        self.state[param]["previous"] = self.keep(grad)

    def keep(self, grad: Tensor) -> Tensor:
        """What the next step sees."""
        return grad


class KeepingCopies(KeepingGradients):
    def keep(self, grad: Tensor) -> Tensor:
        return grad.clone()


class Trained(Descent):
    def change(self, param: Tensor, grad: Tensor, rate: float) -> None:
        if param.requires_grad:
            super().change(param, grad, rate)


class ParametersOnly(Descent):
    def change(self, param: Tensor, grad: Tensor, rate: float) -> None:
        if isinstance(param, nn.Parameter):
            super().change(param, grad, rate)


class AggMo(Descent):
    """Averages several momenta, which it keeps in a dict."""

    def change(self, param: Tensor, grad: Tensor, rate: float) -> None:
        momenta = self.state[param].setdefault("momentum_buffer", {})
        for beta in (0.0, 0.9):
            momentum = momenta.setdefault(beta, torch.zeros_like(param)).mul_(beta).add_(grad)
            param.sub_(rate / 2 * momentum)


class Noting(Descent):
    """Notes something that no step looks at."""

    def change(self, param: Tensor, grad: Tensor, rate: float) -> None:
        super().change(param, grad, rate)
        self.state[param]["noted"] = self.note()

    def note(self) -> Any:
        """Not one value per element."""
        return torch.zeros(10)


class NotingNumpy(Noting):
    def note(self) -> Any:
        return np.int64(3)


def train(inner: Make, world: World | None = None, **settings: Any) -> list[Tensor]:
    """Three steps of a layer that is the same on all ranks."""
    model = nn.Linear(3, 2).double()
    fill(model)
    optimizer: Any = inner(model.parameters())
    if world is not None:
        optimizer = DistributedOptimizer(optimizer, model, world=world, **settings)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 3), step + 1.0).double()).square().sum().backward()
        optimizer.step()
    values = [param.detach().clone() for param in model.parameters()]
    if world is not None:
        optimizer.close()
    return values


def assert_refused(make: Make, told: str, size: int, **settings: Any) -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        with pytest.raises(ConfigError, match=told):
            DistributedOptimizer(make(model.parameters()), model, world=world, **settings)

    run_ranks(size, rank)


@GATHERS
@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_that_gives_parameters_other_memory_is_refused(size: int, gather: str) -> None:
    """The model would keep the values with which it began."""
    assert_refused(Moving, r"Moving gives tensors other memory .*copy_\(", size, gather=gather)


@GATHERS
@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_that_keeps_the_gradient_itself_is_refused(size: int, gather: str) -> None:
    """It would find the next one in the place of the one that it has kept."""
    told = r"KeepingGradients keeps p.grad itself .*keep p.grad.clone\(\)"
    assert_refused(KeepingGradients, told, size, gather=gather)


@GATHERS
@pytest.mark.parametrize("make", [KeepingCopies, Trained])
def test_an_optimizer_that_asks_what_requires_grad_trains_all(make: Make, gather: str) -> None:
    """And so does one that keeps copies of gradients."""
    alone = train(make)
    for found in run_ranks(2, lambda world: train(make, world, gather=gather)):
        torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-13)


@GATHERS
@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_that_asks_for_parameters_is_refused(size: int, gather: str) -> None:
    told = "changes nothing.* leaves out what is no nn.Parameter.* ask for p.requires_grad"
    assert_refused(ParametersOnly, told, size, gather=gather)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (AggMo, "AggMo keeps 'momentum_buffer' in its state as a dict"),
        (Noting, r"Noting keeps 'noted' in its state as a tensor of shape \(10,\) where"),
        (NotingNumpy, "NotingNumpy keeps 'noted' in its state as a int64"),
    ],
)
def test_state_that_cannot_be_cut_is_refused_where_it_would_be(make: Make, told: str) -> None:
    assert_refused(make, f"{told}.*use .*gather='gradients'", 2, shards="even")
    alone = train(make)
    whole: list[dict[str, Any]] = [{"gather": "gradients"}, {"shards": "auto"}]
    for settings in whole:
        for found in run_ranks(2, lambda world: train(make, world, **settings)):  # noqa: B023
            torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-13)


def test_nested_state_that_was_taken_does_not_change_when_training_goes_on() -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        inner = AggMo(model.parameters())
        optimizer = DistributedOptimizer(inner, model, world=world, gather="gradients")
        for loads in (False, True):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            taken = optimizer.state_dict()
            before = copy.deepcopy(taken)
            if loads:
                optimizer.load_state_dict(taken)
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.synchronize()
            assert str(taken) == str(before)
        optimizer.close()

    run_ranks(2, rank)


def test_groups_that_differ_in_the_names_of_their_parameters_are_tried_once() -> None:
    """A group for each layer would make hundreds of steps per layer before training begins."""
    counts = {}

    class Counted(Descent):
        num_changes = 0

        def change(self, param: Tensor, grad: Tensor, rate: float) -> None:
            type(self).num_changes += 1
            super().change(param, grad, rate)

    def rank(world: World) -> None:
        for num_layers in (2, 6):
            model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_layers)))
            groups = [{"params": [named], "lr": 0.1} for named in model.named_parameters()]
            Counted.num_changes = 0
            DistributedOptimizer(Counted(groups), model, world=world).close()
            counts[num_layers] = Counted.num_changes

    run_ranks(1, rank)
    assert 0 < counts[2] == counts[6]
