"""``keep_gradients()``: a script does to ``param.grad`` what it likes, as in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.errors import ReplicaMismatchError, UsageError
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.mpi.oracle import Case, Training
from tests.unit.engine.same_as_alone import assert_same_as_alone

CASES = pytest.mark.parametrize(
    "case",
    [
        Case(optimizer="nesterov", gather="gradients"),
        Case(optimizer="sgd", gather="gradients", schedule="wfbp", cap_mb=1.0),
    ],
    ids=["dear", "wfbp"],
)

Change = Callable[[list[Any]], object]


def keep(training: Training) -> list[Any]:
    """The model's parameters, whose gradients are kept."""
    if isinstance(training.optimizer, DistributedOptimizer):
        training.optimizer.keep_gradients()
    return list(training.model.parameters())


def clear_one(params: list[Any]) -> None:
    params[2].grad = None


def replace_one(params: list[Any]) -> None:
    params[2].grad = params[2].grad * 2.0


def set_data(params: list[Any]) -> None:
    params[2].grad.data = torch.ones_like(params[2])


def add_noise(params: list[Any]) -> None:
    for number, param in enumerate(params):
        param.grad.add_(0.01 * number)


def write_a_view(params: list[Any]) -> None:
    params[1].grad.view(-1)[:2].fill_(0.25)


def write_an_element(params: list[Any]) -> None:
    params[1].grad[0] = 0.5


def write_lists(params: list[Any]) -> None:
    torch._foreach_add_([param.grad for param in params], 0.1)


@CASES
@pytest.mark.parametrize(
    "change",
    [clear_one, replace_one, set_data, add_noise, write_a_view, write_an_element, write_lists],
    ids=lambda change: change.__name__,
)
def test_every_change_of_a_gradient_counts_in_the_step(case: Case, change: Change) -> None:
    def script(training: Training) -> None:
        params = keep(training)
        for step in range(4):
            training.optimizer.zero_grad()
            training.backward(step)
            if step != 1:
                change(params)
            training.optimizer.step()

    assert_same_as_alone(script, case)


def clip(training: Training) -> None:
    training.clip(2.0)


def scale(training: Training) -> None:
    if isinstance(training.optimizer, DistributedOptimizer):
        training.optimizer.scale_gradients_(0.5)
    else:
        torch._foreach_mul_(
            [p.grad for p in training.model.parameters() if p.grad is not None], 0.5
        )


@CASES
@pytest.mark.parametrize("use", [clip, scale], ids=["clip", "scale"])
@pytest.mark.parametrize("change", [clear_one, replace_one, set_data, add_noise])
def test_every_change_of_a_gradient_counts_where_it_is_clipped_or_scaled(
    case: Case, change: Change, use: Callable[[Training], None]
) -> None:
    def script(training: Training) -> None:
        params = keep(training)
        for step in range(3):
            training.optimizer.zero_grad()
            training.backward(step)
            change(params)
            use(training)
            training.optimizer.step()

    assert_same_as_alone(script, case)


@CASES
def test_a_backprop_adds_to_what_is_read_and_to_what_stays(case: Case) -> None:
    def script(training: Training) -> None:
        params = keep(training)
        for step in range(5):
            training.backward(step)
            add_noise(params)
            training.backward(step + 1)
            assert all(bool(param.grad.isfinite().all()) for param in params)
            training.optimizer.step()
            if step == 2:
                training.model.zero_grad()

    assert_same_as_alone(script, replace(case, optimizer="sgd"))


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def on_two_ranks(script: Callable[[World, DistributedOptimizer, Any], Any]) -> list[Any]:
    """What ``script`` returns on each, given an optimizer that keeps gradients and its model."""

    def train(world: World) -> Any:
        model, optimizer = small()
        wrapped = DistributedOptimizer(optimizer, model, world=world, gather="gradients")
        wrapped.keep_gradients()
        result = script(world, wrapped, model)
        wrapped.close()
        return result

    return run_ranks(2, train)


def backward(model: nn.Module, factor: float) -> None:
    inputs = torch.full((2, 3), factor, dtype=torch.float64)
    model(inputs).square().mean().backward()


def test_what_a_script_keeps_of_a_gradient_stays_as_it_is() -> None:
    def script(world: World, optimizer: DistributedOptimizer, model: Any) -> None:
        backward(model, 1.0 + world.rank)
        whole, view = model.weight.grad, model.bias.grad.view(-1)
        before = whole.clone(), view.clone()
        for step in range(3):
            optimizer.step()
            optimizer.zero_grad()
            backward(model, 2.0 + step)
            assert not torch.equal(model.weight.grad, before[0])
        assert torch.equal(whole, before[0]) and torch.equal(view, before[1])

    on_two_ranks(script)


def test_gradients_can_be_read_after_the_step_and_after_close() -> None:
    read: list[Tensor] = []

    def script(world: World, optimizer: DistributedOptimizer, model: Any) -> Any:
        backward(model, 1.0 + world.rank)
        before = model.weight.grad.clone()
        optimizer.step()
        assert torch.equal(model.weight.grad, before)
        read.append(before)
        return model

    models = on_two_ranks(script)
    for model in models:
        assert type(model.weight.grad) is Tensor and torch.equal(model.weight.grad, read[0])


def test_one_rank_may_read_alone() -> None:
    def script(world: World, optimizer: DistributedOptimizer, model: Any) -> float:
        backward(model, 1.0 + world.rank)
        found = float(model.weight.grad.sum()) if world.is_root else 0.0
        optimizer.step()
        return found

    assert on_two_ranks(script)[0] != 0.0


def test_ranks_that_change_gradients_differently_are_told() -> None:
    def script(world: World, optimizer: DistributedOptimizer, model: Any) -> None:
        backward(model, 1.0 + world.rank)
        if world.is_root:
            model.weight.grad.add_(1.0)
        optimizer.step()
        optimizer.synchronize()
        backward(model, 1.0)

    with raises(ReplicaMismatchError, "ranks-change-gradients-differently"):
        on_two_ranks(script)


def test_memory_of_a_gradient_is_not_replaced() -> None:
    def script(world: World, optimizer: DistributedOptimizer, model: Any) -> None:
        backward(model, 1.0)
        with raises(UsageError, "gradient-in-reduction", "weight"):
            model.weight.grad.resize_(1)
        optimizer.step()

    on_two_ranks(script)


def test_shards_of_parameters_keep_no_gradients() -> None:
    def train(world: World) -> None:
        model, optimizer = small()
        wrapped = DistributedOptimizer(optimizer, model, world=world)
        with raises(UsageError, "settings-contradict", "gather='parameters'"):
            wrapped.keep_gradients()
        wrapped.close()

    run_ranks(2, train)
