"""A snapshot of another model is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dearmpi.errors import CheckpointError, UsageError
from dearmpi.train import checkpoint
from dearmpi.train.checkpoint import Snapshot
from tests.codes import raises
from tests.unit.train.checkpoint.example_snapshot import make_snapshot


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"weight": torch.zeros(4, 2)}, ("weight is", "(4, 3)", "(4, 2)")),
        ({"weight": torch.zeros(4, 3).double()}, ("weight is", "torch.float32", "torch.float64")),
        ({"extra": torch.zeros(1)}, ("extra is",)),
        ({"bias": None}, ("bias is",)),
    ],
)
def test_another_model_is_refused(change: dict[str, Any], told: tuple[str, ...]) -> None:
    snapshot = make_snapshot()
    checkpoint.check_model(snapshot, snapshot.model)
    state = {name: t for name, t in (snapshot.model | change).items() if t is not None}
    with raises(CheckpointError, "checkpoint-of-other-model", *told):
        checkpoint.check_model(snapshot, state)


def test_only_the_first_differences_are_named() -> None:
    state = {f"layer{i}": torch.zeros(1) for i in range(40)}
    with raises(CheckpointError, "checkpoint-of-other-model", "layer4 is", 37):
        checkpoint.check_model(make_snapshot(), state)


def test_two_tensors_cannot_be_loaded_into_a_tied_one() -> None:
    one = torch.zeros(2)
    snapshot = Snapshot(1, {"a": torch.zeros(2), "b": torch.ones(2)}, {}, [], {})
    with raises(CheckpointError, "checkpoint-of-other-model"):
        checkpoint.check_model(snapshot, {"a": one, "b": one})
    equal = Snapshot(1, {"a": torch.zeros(2), "b": torch.zeros(2)}, {}, [], {})
    checkpoint.check_model(equal, {"a": one, "b": one})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.first(x)))  # type: ignore[no-any-return]


def make_adam(model: Tied, *, swapped: bool = False) -> torch.optim.Adam:
    groups: list[dict[str, Any]] = [
        {"params": [model.last.bias], "lr": 0.01, "betas": (0.8, 0.9)},
        {"params": [*model.first.parameters(), *model.frozen.parameters()]},
    ]
    return torch.optim.Adam(groups[::-1] if swapped else groups, lr=0.1)


def train_step(model: Tied, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()


def take_snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Snapshot:
    names = checkpoint.parameter_names(model, optimizer.param_groups)
    state, groups = checkpoint.optimizer_by_name(optimizer.state_dict(), names)
    return Snapshot(step, model.state_dict(), state, groups, {})


def test_a_resumed_optimizer_goes_on_bit_identically(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = make_adam(model)
    for _ in range(3):
        train_step(model, optimizer)
    path = checkpoint.save(tmp_path, take_snapshot(model, optimizer, 3))
    for _ in range(3):
        train_step(model, optimizer)

    torch.manual_seed(1)
    resumed = Tied()
    resumed_optimizer = make_adam(resumed)
    snapshot = checkpoint.load(path)
    checkpoint.check_model(snapshot, resumed.state_dict())
    resumed.load_state_dict(snapshot.model)
    names = checkpoint.parameter_names(resumed, resumed_optimizer.param_groups)
    assert "frozen.weight" in names and "frozen.weight" not in snapshot.optimizer
    resumed_optimizer.load_state_dict(checkpoint.optimizer_state_dict(snapshot, names))
    assert resumed_optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    for _ in range(3):
        train_step(resumed, resumed_optimizer)
    for name, expected in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], expected), name


def test_state_follows_the_name_when_parameters_come_in_another_order(tmp_path: Path) -> None:
    left, right = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    model = nn.ParameterDict({"left": left, "right": right})
    optimizer = torch.optim.SGD([left, right], lr=0.1, momentum=0.9)
    left.grad, right.grad = torch.full((2,), 1.0), torch.full((2,), 2.0)
    optimizer.step()
    snapshot = take_snapshot(model, optimizer, 1)

    other = torch.optim.SGD([right, left], lr=0.1, momentum=0.9)
    names = checkpoint.parameter_names(model, other.param_groups)
    other.load_state_dict(checkpoint.optimizer_state_dict(snapshot, names))
    assert other.state[left]["momentum_buffer"].tolist() == [1.0, 1.0]
    assert other.state[right]["momentum_buffer"].tolist() == [2.0, 2.0]


def test_groups_divided_otherwise_are_refused() -> None:
    model = Tied()
    snapshot = take_snapshot(model, make_adam(model), 1)
    names = checkpoint.parameter_names(model, make_adam(model, swapped=True).param_groups)
    with raises(CheckpointError, "checkpoint-of-other-model", "last.bias", "first.weight"):
        checkpoint.optimizer_state_dict(snapshot, names)
    with raises(CheckpointError, "checkpoint-of-other-model", 1, "['new']"):
        checkpoint.optimizer_state_dict(snapshot, [*names, "new"])


def test_a_foreign_parameter_is_refused() -> None:
    model, foreign = nn.Linear(2, 2), nn.Parameter(torch.zeros(7))
    with raises(UsageError, "parameters-not-in-model", "(7,)", "that is"):
        checkpoint.parameter_names(model, torch.optim.SGD([foreign]).param_groups)
    with raises(UsageError, "parameters-not-in-model", 2, 1):
        checkpoint.optimizer_by_name(torch.optim.SGD(model.parameters()).state_dict(), ["weight"])
