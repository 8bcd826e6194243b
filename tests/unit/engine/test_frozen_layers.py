"""Layers that are frozen and unfrozen while training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from tests.fakes.ranks import run_ranks
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


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("values", [torch.arange(5), torch.ones(5, dtype=torch.bool)])
def test_parameters_of_integers_stay_as_they_are(values: Tensor, gather: Any) -> None:
    """As quantised ones do, which have no gradients."""

    def rank(world: World) -> list[Any]:
        model = nn.Linear(3, 2)
        model.codes = nn.Parameter(values.clone(), requires_grad=False)
        if not world.is_root:
            model.codes.data.zero_()
        inner = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world, gather=gather)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        optimizer.fuse(1e-6)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.close()
        return model.codes.tolist()

    assert run_ranks(2, rank) == [values.tolist()] * 2
