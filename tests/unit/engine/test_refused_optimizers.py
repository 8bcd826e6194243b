"""Optimizers that would not train alike where each bucket is updated by itself are refused."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from tests.codes import raises
from tests.fakes.ranks import run_ranks

Make = Callable[[Any], torch.optim.Optimizer]


class Plain(torch.optim.Optimizer):
    """Gradient descent, with something to do before each parameter is changed."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.num_steps = 0
        self.momenta: dict[Tensor, Tensor] = {}
        self.recent: list[float] = []
        self.checked = False

    def begin(self) -> None:
        """Before a step."""

    def direction(self, param: Tensor) -> Tensor:
        """Where to go."""
        assert param.grad is not None
        return param.grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.begin()
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(self.direction(param), alpha=group["lr"])


class Counting(Plain):
    def begin(self) -> None:
        self.num_steps += 1

    def direction(self, param: Tensor) -> Tensor:
        return super().direction(param) / self.num_steps


class CountingInItsState(Plain):
    def begin(self) -> None:
        common: Any = self.state
        common["all"]["step"] = common["all"].get("step", 0) + 1

    def direction(self, param: Tensor) -> Tensor:
        common: Any = self.state
        direction: Tensor = super().direction(param) / common["all"]["step"]
        return direction


class Remembering(Plain):
    def direction(self, param: Tensor) -> Tensor:
        assert param.grad is not None
        return self.momenta.setdefault(param, torch.zeros_like(param)).mul_(0.9).add_(param.grad)


class Anchored(Plain):
    """Goes back to where it has begun, which it notes in its first step."""

    def direction(self, param: Tensor) -> Tensor:
        return param - self.momenta.setdefault(param, param.clone() + 1)


class Logging(Plain):
    """Notes what no step looks at."""

    def begin(self) -> None:
        self.num_steps += 1
        self.recent = [*self.recent[-9:], time.time()]


class Caching(Plain):
    """Works factors out once, by the step that it takes from the parameter's state."""

    def direction(self, param: Tensor) -> Tensor:
        number = self.state[param]["step"] = self.state[param].get("step", 0) + 1
        factors: dict[int, float] = vars(self).setdefault("factors", {})
        return super().direction(param) * factors.setdefault(number, 1 / (1 - 0.9**number))


class FindingOut(Plain):
    """Its first step looks at what there is, once for all."""

    def begin(self) -> None:
        self.checked = True


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("make", "attribute"),
    [
        (Counting, "num_steps"),
        (CountingInItsState, "state['all']"),
        (Remembering, "momenta"),
        (Anchored, "momenta"),
    ],
)
def test_an_optimizer_that_keeps_state_on_itself_is_refused_by_the_attribute(
    make: Make, attribute: str, size: int, gather: Any
) -> None:
    """It would be lost with buckets that change, and differ where a gradient is missing."""

    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        with raises(ConfigError, "optimizer-couples-buckets", make.__name__, attribute):
            DistributedOptimizer(make(model.parameters()), model, world=world, gather=gather)

    run_ranks(size, rank)


class Normalizing(Plain):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        norms = [param.grad.norm() for param in params]
        for param in params:
            param.sub_(param.grad / sum(norms))


@pytest.mark.parametrize("settings", [{}, {"shards": "whole"}, {"gather": "gradients"}], ids=str)
def test_an_optimizer_that_reads_all_gradients_is_refused_with_what_a_trial_saw(
    settings: dict[str, Any],
) -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        optimizer = Normalizing(model.parameters())
        with raises(ConfigError, "optimizer-couples-buckets", "Normalizing", "differ"):
            DistributedOptimizer(optimizer, model, world=world, **settings)

    run_ranks(2, rank)


@pytest.mark.parametrize("make", [FindingOut, Logging, Caching])
def test_what_an_optimizer_keeps_on_itself_may_change_where_no_step_depends_on_it(
    make: Make,
) -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        DistributedOptimizer(make(model.parameters()), model, world=world).close()

    run_ranks(2, rank)


class Clipping(Plain):
    """Shortens gradients of a tensor whose norm is beyond a limit, or lengthens those below one."""

    def __init__(self, params: Any, least: float, most: float) -> None:
        super().__init__(params)
        self.least, self.most = least, most

    def direction(self, param: Tensor) -> Tensor:
        assert param.grad is not None
        norm = float(param.grad.norm())
        return param.grad * (min(max(norm, self.least), self.most) / norm)


@pytest.mark.parametrize("limits", [(0.0, 100.0), (0.1, 1e9)], ids=["large", "small"])
def test_an_optimizer_that_clips_large_or_small_tensors_is_refused(
    limits: tuple[float, float],
) -> None:
    """Of a shard it would know the shard's norm only."""

    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        with raises(ConfigError, "optimizer-needs-whole-tensors", "treat every element by itself"):
            inner = Clipping(model.parameters(), *limits)
            DistributedOptimizer(inner, model, world=world, shards="even")
        inner = Clipping(model.parameters(), *limits)
        DistributedOptimizer(inner, model, world=world, gather="gradients").close()

    run_ranks(2, rank)


class SparingRows(Plain):
    """Lets weights decay, but for those with gradients at right angles to each row, as AdamP."""

    def direction(self, param: Tensor) -> Tensor:
        assert param.grad is not None
        if param.dim() > 1:
            rows, values = param.grad.flatten(1), param.flatten(1)
            if torch.cosine_similarity(rows, values).abs().max() < 0.1 / len(rows[0]) ** 0.5:
                return param.grad
        return param.grad + param


class CentringFilters(Plain):
    """Takes the mean off the gradients of convolutions alone, as Ranger can."""

    def direction(self, param: Tensor) -> Tensor:
        assert param.grad is not None
        if param.dim() < 4:
            return param.grad
        centred: Tensor = param.grad - param.grad.mean((1, 2, 3), keepdim=True)
        return centred


@pytest.mark.parametrize("make", [SparingRows, CentringFilters])
def test_an_optimizer_that_looks_at_angles_or_at_filters_is_refused(make: Make) -> None:
    """No gradient at random is at right angles to a matrix, and no matrix is a filter."""

    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        with raises(ConfigError, "optimizer-needs-whole-tensors", "treat every element by itself"):
            DistributedOptimizer(make(model.parameters()), model, world=world, shards="even")
        inner = make(model.parameters())
        DistributedOptimizer(inner, model, world=world, gather="gradients").close()

    run_ranks(2, rank)


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_a_step_that_was_replaced_on_the_instance_is_refused(gather: Any, scheduled: bool) -> None:
    """Unless a scheduler did, which counts the calls."""

    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        inner: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        take = inner.step

        @functools.wraps(take)
        def step(self: Any, closure: Any = None) -> Any:
            model.weight.data.mul_(0.9)
            return take(closure)

        torch.optim.lr_scheduler.StepLR(inner, 1)
        DistributedOptimizer(inner, model, world=world, gather=gather).close()
        inner.step = MethodType(step, inner)
        if scheduled:
            torch.optim.lr_scheduler.StepLR(inner, 1)
        with raises(ConfigError, "optimizer-changed", "SGD", "replaced on the instance"):
            DistributedOptimizer(inner, model, world=world, gather=gather)

    run_ranks(2, rank)


class Scaling(Plain):
    """Looks up on each parameter how far it goes."""

    def direction(self, param: Tensor) -> Tensor:
        assert param.grad is not None
        return param.grad * getattr(param, "scale", 1.0)


def test_gathered_gradients_let_an_optimizer_see_attributes_of_parameters() -> None:
    def rank(world: World) -> list[float]:
        model = nn.Linear(1, 1)
        nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        vars(model.weight)["scale"] = 0.5
        inner = Scaling(model.parameters())
        optimizer = DistributedOptimizer(inner, model, world=world, gather="gradients")
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.close()
        return [param.item() for param in model.parameters()]

    assert run_ranks(2, rank) == [pytest.approx([-0.05, -0.1])] * 2
