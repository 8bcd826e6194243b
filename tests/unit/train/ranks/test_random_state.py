"""Random numbers go on after a restore as if nothing had happened in between."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dearmpi.errors import CheckpointError
from dearmpi.train.ranks.random_state import capture_random_state, restore_random_state
from tests.codes import raises


@pytest.fixture(autouse=True)
def leave_random_state_alone() -> Iterator[None]:
    state = capture_random_state()
    yield
    restore_random_state(state)


def draw() -> list[float]:
    return [
        *torch.randn(3).tolist(),
        torch.randint(0, 1000, (1,)).item(),
        *np.random.standard_normal(3).tolist(),
        np.random.randint(1000),
        random.gauss(0, 1),
        random.random(),
    ]


def test_numbers_go_on_bit_for_bit_after_a_trip_through_json() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    draw()  # an odd number of normal variates: both generators keep one in store
    text = json.dumps(capture_random_state())
    expected = [draw() for _ in range(2)]
    torch.manual_seed(4)
    np.random.seed(4)
    random.seed(4)
    assert draw() != expected[0]
    restore_random_state(json.loads(text))
    assert [draw() for _ in range(2)] == expected


@pytest.mark.parametrize("name", ["torch", "numpy", "python"])
def test_a_state_of_another_kind_is_refused(name: str) -> None:
    state = capture_random_state()
    with raises(CheckpointError, "random-state-misfit"):
        restore_random_state(state | {name: "AAAA"})
    del state[name]
    with raises(CheckpointError, "random-state-misfit"):
        restore_random_state(state)
