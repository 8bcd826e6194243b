"""What ``zero_grad`` leaves behind: no gradient and a gradient of zero differ to an optimizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dearmpi
from dearmpi.comm.world import World
from dearmpi.config import Gather
from dearmpi.errors import UsageError
from tests.codes import raises


class Branches(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.even, self.odd = nn.Linear(4, 3), nn.Linear(4, 3)
        self.double()

    def forward(self, data: Tensor, *, odd: bool) -> Tensor:
        chosen: Tensor = self.odd(data) if odd else self.even(data)
        return chosen


def both(
    world: World, gather: Gather
) -> tuple[tuple[Branches, torch.optim.Optimizer], tuple[Branches, dearmpi.DistributedOptimizer]]:
    """A model in plain torch and one on all ranks, with their optimizers."""
    plain, model = Branches(), Branches()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    other = dearmpi.DistributedOptimizer(inner, model, world=world, gather=gather)
    return (plain, torch.optim.AdamW(plain.parameters(), lr=0.1)), (model, other)


def take_two_steps(model: Branches, optimizer: torch.optim.Optimizer, data: Tensor) -> None:
    """Without the odd layer."""
    for _ in range(2):
        model(data, odd=False).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def assert_equal(model: Branches, plain: Branches) -> None:
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=0)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_parameter_out_of_use_is_left_alone_or_updated_with_zero_as_torch_does(
    world: World, gather: Gather, set_to_none: bool
) -> None:
    (plain, one), (model, other) = both(world, gather)
    data = torch.ones(2, 4, dtype=torch.float64)
    for step in range(6):
        for trained, optimizer in ((plain, one), (model, other)):
            optimizer.zero_grad(set_to_none=set_to_none)
            trained(data * step, odd=step % 3 == 1).square().sum().backward()
            optimizer.step()
    assert_equal(model, plain)
    other.close()


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_a_gradient_of_zero_stays_one_where_buckets_change(world: World, gather: Gather) -> None:
    """As where a script zeroes gradients after a step, and lays out anew between epochs."""
    (plain, one), (model, other) = both(world, gather)
    data = torch.ones(2, 4, dtype=torch.float64)
    for step in range(4):
        for trained, optimizer in ((plain, one), (model, other)):
            trained(data * step, odd=step == 1).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        other.fuse(1.0 if step % 2 else 1e-5)
    assert_equal(model, plain)
    other.close()


def clear_after_a_backward(model: Branches) -> None:
    model(torch.ones(2, 4, dtype=torch.float64), odd=False).sum().backward()
    model.zero_grad()


def clear_one(model: Branches) -> None:
    model.odd.weight.grad = None


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize(
    ("clear", "gather", "keeps"),
    [
        (Branches.zero_grad, "gradients", True),
        (clear_one, "gradients", True),
        (clear_after_a_backward, "gradients", True),
        (clear_after_a_backward, "gradients", False),
        (clear_after_a_backward, "parameters", False),
    ],
)
def test_a_gradient_of_zero_that_the_script_sets_to_none_is_none_again(
    clear: Callable[[Branches], None], gather: Gather, keeps: bool, world: World
) -> None:
    """An unused parameter decays on with the first, and stays with the second."""
    (plain, one), (model, other) = both(world, gather)
    if keeps:
        other.keep_gradients()
    data = torch.ones(2, 4, dtype=torch.float64)
    for trained, optimizer in ((plain, one), (model, other)):
        for odd in (True, False):
            trained(data, odd=odd).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        clear(trained)
        take_two_steps(trained, optimizer, data)
    assert_equal(model, plain)
    other.close()


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize(
    ("gather", "keeps"), [("gradients", True), ("gradients", False), ("parameters", False)]
)
def test_a_gradient_that_no_step_has_used_is_zeroed_as_well(
    gather: Gather, keeps: bool, world: World
) -> None:
    """As where a gradient scaler skips a step."""
    (plain, one), (model, other) = both(world, gather)
    if keeps:
        other.keep_gradients()
    data = torch.ones(2, 4, dtype=torch.float64)
    for trained, optimizer in ((plain, one), (model, other)):
        trained(data, odd=True).square().sum().backward()
        optimizer.zero_grad(set_to_none=False)
        shown = trained.odd.weight.grad
        assert shown is None or not shown.any()
        assert (shown is not None) or (trained is model and not keeps)
        take_two_steps(trained, optimizer, data)
    assert_equal(model, plain)
    other.close()


@pytest.mark.ranks(at_least=2)
def test_reading_halfway_through_an_eager_step_is_refused_not_waited_for(world: World) -> None:
    model = Branches()
    optimizer = dearmpi.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        world=world,
        eager=True,
        bucket_cap_mb=1e-5,
    )
    model(torch.ones(2, 4, dtype=torch.float64), odd=True).sum().backward()
    with raises(UsageError, "parameters-read-too-early", "read between backward and step"):
        model.state_dict()
    optimizer.step()
    model.state_dict()
    optimizer.close()
