"""Parameters that come, go, or are left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dearmpi.comm.world import World
from tests.mpi.models import NUM_FEATURES, squared_error
from tests.mpi.oracle import copies, flat_state
from tests.mpi.semantics import (
    SEMANTICS,
    Side,
    adam,
    assert_same_on_both_sides,
    layers,
    outcome,
    seeded,
    slow_adam,
    train,
    whole_batch,
)

pytestmark = SEMANTICS


class Choice(nn.Module):
    """``forward(inputs, rows)``: only the samples ``rows`` pass through ``branch``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, 5)
        self.branch = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, inputs: Tensor, rows: Tensor) -> Tensor:
        hidden = self.first(inputs).tanh()
        chosen = rows.nonzero()[:, 0]
        if len(chosen):
            hidden = hidden.index_add(0, chosen, self.branch(hidden[chosen]).tanh())
        outputs: Tensor = self.last(hidden)
        return outputs


def train_with_rows(side: Side, rows_of_step: list[list[int]]) -> dict[str, Tensor]:
    model = seeded(Choice)
    # With weight decay and momentum, a zero gradient is not the same as none.
    optimizer = side.wrap(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    for step, rows in enumerate(rows_of_step):
        optimizer.zero_grad()
        flags = torch.zeros(len(whole_batch(step)), dtype=torch.bool)
        flags[rows] = True
        side.average(squared_error(model(side.inputs(step), side.share(flags)))).backward()
        optimizer.step()
    return outcome(model, optimizer)


def test_parameters_unused_on_all_ranks_in_some_iterations(gather: str, world: World) -> None:
    every = list(range(7))
    assert_same_on_both_sides(
        lambda side: train_with_rows(side, [every, [], every, [], [], every]), world, gather=gather
    )


def test_parameters_unused_on_some_ranks(gather: str, world: World) -> None:
    """Sample 0 is on the first rank, 6 on the last."""
    assert_same_on_both_sides(
        lambda side: train_with_rows(side, [[0], [6], [], [0, 6], [3], [0]]), world, gather=gather
    )


def test_parameters_that_are_never_used(gather: str, world: World) -> None:
    assert_same_on_both_sides(
        lambda side: train_with_rows(side, [[], [], []]), world, gather=gather
    )


def test_frozen_parameters_under_the_optimizer(gather: str, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        model[2].requires_grad_(False)
        optimizer = side.wrap(adam(model), model)
        train(side, model, optimizer)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


def test_requires_grad_switched_during_training(gather: str, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        model[4].requires_grad_(False)
        optimizer = side.wrap(adam(model), model)
        for step in range(7):
            if step == 2:
                model[4].requires_grad_(True)
                model[2].weight.requires_grad_(False)
            if step == 4:
                model[0].requires_grad_(False)
            if step == 5:
                model.requires_grad_(True)
            optimizer.zero_grad()
            side.loss(model, step).backward()
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


def test_parameters_added_later_by_add_param_group(gather: str, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(torch.optim.Adam(model[4].parameters(), lr=0.01), model)
        train(side, model, optimizer, 2)
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})
        train(side, model, optimizer, 2)
        optimizer.add_param_group({"params": list(model[0].parameters())})
        train(side, model, optimizer, 2)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


class Adapted(nn.Module):
    """A layer with a second one beside it, as where a model is fine-tuned."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base = layer
        self.beside = nn.Linear(layer.in_features, layer.out_features, bias=False).double()
        nn.init.zeros_(self.beside.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.base(inputs) + self.beside(inputs)
        return outputs


def put_beside(model: nn.Sequential) -> nn.Module:
    """``2.weight`` is ``2.base.weight`` from then on."""
    adapted = model[2] = Adapted(model[2])  # type: ignore[arg-type]
    return adapted.beside


def put_between(model: nn.Sequential) -> nn.Module:
    """``2.weight`` is another parameter from then on, and what it was is ``3.weight``."""
    first: nn.Linear = model[0]  # type: ignore[assignment]
    new = nn.Linear(first.out_features, first.out_features, bias=False).double()
    nn.init.eye_(new.weight)
    model.insert(2, new)
    return new


@pytest.mark.parametrize("put", [put_beside, put_between])
def test_parameters_that_get_other_names_keep_their_state(
    put: Callable[[nn.Sequential], nn.Module], gather: str, world: World
) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(slow_adam(model), model)
        train(side, model, optimizer, 2)
        optimizer.add_param_group({"params": list(put(model).parameters())})
        train(side, model, optimizer, 2)
        if side.is_distributed:
            optimizer.fuse(0.001)
        train(side, model, optimizer, 2)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


class Transposed(nn.Module):
    """A parameter that does not lie in memory row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, NUM_FEATURES, dtype=torch.float64).t())
        self.last = nn.Linear(7, 3, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last((inputs @ self.weight).tanh())
        return outputs


@pytest.mark.parametrize("fused", [False, True])
def test_a_parameter_that_lies_in_memory_column_by_column(
    fused: bool, gather: str, world: World
) -> None:
    """A fused optimizer goes through memory, and does not look which element is which."""

    def script(side: Side) -> dict[str, Tensor]:
        model = seeded(Transposed)
        inner = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
        optimizer = side.wrap(inner, model)
        train(side, model, optimizer)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


class WithoutWidth(nn.Module):
    """Has a set of features that happens to be empty."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Linear(0, 3)
        self.last = nn.Linear(NUM_FEATURES, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(inputs) + self.none(inputs[:, :0])
        return outputs


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_parameters_without_elements(gather: str, world: World) -> None:
    """In another dtype, too, than those whose buckets they might be in."""

    def script(side: Side) -> dict[str, Tensor]:
        model = seeded(WithoutWidth)
        model.none.register_parameter("unused", nn.Parameter(torch.ones(0, dtype=torch.float16)))
        optimizer = side.wrap(adam(model), model)
        train(side, model, optimizer, 2)
        optimizer.load_state_dict(optimizer.state_dict())
        if side.is_distributed:
            optimizer.fuse(1.0)
        optimizer.zero_grad(set_to_none=False)
        train(side, model, optimizer, 2)
        found = optimizer.state_dict()["state"]
        # In plain torch those without elements have a state too, without elements.
        shown = [i for i, param in enumerate(model.parameters()) if param.numel()]
        return {**copies(model), **flat_state({"state": {i: found[i] for i in shown}})}

    assert_same_on_both_sides(script, world, gather=gather)
