"""A snapshot of another model is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dearmpi.errors import CheckpointError
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
