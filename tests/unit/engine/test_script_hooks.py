"""A script's own hooks on gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.errors import UsageError
from tests.codes import raises
from tests.fakes.ranks import run_ranks


def _halve_when_it_comes(param: Tensor, seen: list[Tensor]) -> None:
    def hook(grad: Tensor) -> Tensor:
        seen.append(grad.clone())
        return grad / 2

    param.register_hook(hook)


def _halve_what_is_accumulated(param: Tensor, seen: list[Tensor]) -> None:
    def hook(param: Tensor) -> None:
        assert param.grad is not None
        seen.append(param.grad.clone())
        param.grad.div_(2)

    param.register_post_accumulate_grad_hook(hook)


@pytest.mark.parametrize("halve", [_halve_when_it_comes, _halve_what_is_accumulated])
@pytest.mark.parametrize("changes", [False, True])
def test_hooks_of_the_script_see_and_change_a_rank_s_own_gradients(
    halve: Callable[[Tensor, list[Tensor]], None], changes: bool
) -> None:
    """Those that were there before the engine, when buckets change too."""

    def rank(world: World) -> tuple[list[float], float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        seen: list[Tensor] = []
        halve(model.weight, seen)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(inner, model, world=world)
        for step in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 1), world.rank + step + 1.0)).sum().backward()
            optimizer.step()
            if changes:
                optimizer.fuse(1)
        optimizer.close()
        return [grad.item() for grad in seen], model.weight.item()

    assert run_ranks(2, rank) == [([1.0, 2.0], -2.0), ([2.0, 3.0], -2.0)]


def test_a_hook_that_takes_a_gradient_away_is_refused_by_the_parameter() -> None:
    """As those do that update a parameter inside backprop."""

    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        model.weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        DistributedOptimizer(inner, model, world=world)
        with raises(UsageError, "gradient-taken-by-hook", "param.grad"):
            model(torch.ones(1, 3)).sum().backward()

    run_ranks(2, rank)


def test_a_hook_on_all_gradients_that_comes_after_the_engine_is_refused() -> None:
    """It would see some while they are still the rank's own, and others when they are not."""

    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        DistributedOptimizer(inner, model, world=world)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda param: param.grad.div_(2))
        with raises(UsageError, "gradient-in-reduction"):
            model(torch.ones(1, 3)).sum().backward()

    run_ranks(2, rank)
