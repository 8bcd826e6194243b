"""Layers that are frozen and unfrozen while training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.mpi.oracle import Case, Training
from tests.unit.engine.same_as_alone import EVERY_WAY, assert_same_as_alone


@EVERY_WAY
@pytest.mark.parametrize("eager", [False, True])
def test_layers_frozen_and_unfrozen_on_the_way(case: Case, eager: bool) -> None:
    def script(training: Training) -> None:
        layers: Any = training.model.layers
        for step, frozen in enumerate([(), (0,), (0, 2), (), (4,), (2, 4), ()]):
            for number in (0, 2, 4):
                layers[number].requires_grad_(number not in frozen)
            training.step(step)

    assert_same_as_alone(script, replace(case, eager=eager))


@EVERY_WAY
def test_layers_frozen_from_the_start_and_unfrozen_one_by_one(case: Case) -> None:
    def script(training: Training) -> None:
        layers: Any = training.model.layers
        for number in (0, 2):
            layers[number].requires_grad_(False)
        training.step(0)
        training.step(1)
        for step, number in enumerate((2, 0)):
            layers[number].requires_grad_(True)
            training.step(step + 2)

    assert_same_as_alone(script, case)
