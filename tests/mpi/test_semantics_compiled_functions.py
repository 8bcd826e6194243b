"""Compiled functions: of parameters, of none, of steps, and of an optimizer's arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dearmpi import GradScaler
from dearmpi.comm.world import World
from tests.mpi.models import squared_error
from tests.mpi.semantics import (
    NUM_STEPS,
    ONE_GATHER,
    Side,
    assert_all_guarded,
    assert_same_on_both_sides,
    gather_by_turns,
    layers,
    outcome,
    slow_adam,
)

pytestmark = pytest.mark.ranks(2)


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch.compiler.reset()


@ONE_GATHER
def test_a_compiled_function_without_parameters_makes_nobody_wait(
    gather: str, world: World
) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(slow_adam(model), model)
        loss = compiled_by(side, squared_error)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            side.average(loss(model(side.inputs(step)))).backward()
            optimizer.step()
        if side.is_distributed and side.size > 1:
            assert_all_guarded(optimizer)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


@ONE_GATHER
def test_a_compiled_function_of_parameters(gather: str, world: World) -> None:
    """No module is called, so no hook runs."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(slow_adam(model), model)

        def compute(inputs: Tensor) -> Tensor:
            hidden = functional.linear(inputs, model[0].weight)  # type: ignore[arg-type]
            return functional.linear(hidden.tanh(), model[2].weight)  # type: ignore[arg-type]

        apply = compiled_by(side, compute)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            side.average(squared_error(apply(side.inputs(step)))).backward()
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


def step_alone(side: Side, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    side.loss(model, step).backward()
    compiled_by(side, optimizer.step)()


def backward_alone(side: Side, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    compiled_by(side, lambda: side.loss(model, step).backward())()
    optimizer.step()


def whole_iteration(side: Side, model: nn.Module, optimizer: Any, step: int) -> None:
    def iterate() -> None:
        optimizer.zero_grad()
        side.loss(model, step).backward()
        side.clip(optimizer, model, 0.5)
        optimizer.step()

    compiled_by(side, iterate)()


def scaled_iteration(side: Side, model: nn.Module, optimizer: Any, step: int) -> None:
    scaler = (GradScaler if side.is_distributed else torch.amp.GradScaler)("cpu", init_scale=16.0)

    def iterate() -> None:
        optimizer.zero_grad()
        scaler.scale(side.loss(model, step)).backward()
        scaler.step(optimizer)

    compiled_by(side, iterate)()


def compiled_by(side: Side, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled by dearmpi's side only: a step that torch compiles has its scalars in fp32."""
    return torch.compile(function, backend="eager") if side.is_distributed else function


@gather_by_turns(
    "iterate", (step_alone,), (backward_alone,), (whole_iteration,), (scaled_iteration,)
)
def test_a_compiled_function_that_runs_a_backward_or_steps(
    iterate: Callable[[Side, nn.Module, Any, int], None], gather: str, world: World
) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(slow_adam(model), model)
        for step in range(NUM_STEPS):
            iterate(side, model, optimizer, step)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


class CompiledDescent(torch.optim.Optimizer):
    """Its arithmetic is compiled, as that of many an optimizer is, and anew for every rate."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.descend = torch.compile(_descend, backend="eager", dynamic=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.descend(param, param.grad, group["lr"])


def _descend(param: Tensor, grad: Tensor, lr: float) -> None:
    param.add_(grad, alpha=-lr)


@pytest.mark.ranks(2, 3)
@ONE_GATHER
def test_an_optimizer_whose_arithmetic_is_compiled(gather: str, world: World) -> None:
    """It is compiled where updates run, which must not wait for parameters there; and no later step
    waits for its gathers.
    """

    def script(side: Side) -> dict[str, Tensor]:
        torch.compiler.reset()  # what the other side has compiled
        model = layers()
        optimizer = side.wrap(CompiledDescent(model.parameters(), lr=0.1), model)
        for step in range(NUM_STEPS):
            optimizer.param_groups[0]["lr"] *= 0.7
            optimizer.zero_grad()
            side.loss(model, step).backward()
            optimizer.step()
        if side.is_distributed and side.size > 1:
            assert_all_guarded(optimizer)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)
