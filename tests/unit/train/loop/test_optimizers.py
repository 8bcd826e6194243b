"""Optimizers by name."""

from __future__ import annotations

import pytest
import torch

from dearmpi.errors import TaskError
from dearmpi.train.loop.optimizers import choose_optimizer, known_optimizers
from dearmpi.train.settings.settings import RunSettings
from tests.codes import raises


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3, 2))]


def test_a_name_in_any_case_gets_its_options() -> None:
    settings = RunSettings(
        optimizer="sgd",
        lr=0.1,
        momentum=0.9,
        weight_decay=0.01,
        optimizer_options={"nesterov": True},
    )
    group = choose_optimizer(settings).build(parameters()).param_groups[0]
    assert group["lr"] == 0.1
    assert group["momentum"] == 0.9
    assert group["weight_decay"] == 0.01
    assert group["nesterov"] is True


@pytest.mark.parametrize("name", sorted(known_optimizers()))
def test_every_optimizer_offered_can_be_made_with_its_own_learning_rate(name: str) -> None:
    choice = choose_optimizer(RunSettings(optimizer=name))
    assert choice.build(parameters()).param_groups[0]["lr"] == choice.lr > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (RunSettings(optimizer="adm"), "unknown optimizer 'adm'; did you mean 'Adam'?"),
        (RunSettings(optimizer="LBFGS"), "LBFGS cannot be used"),
        (RunSettings(optimizer="Optimizer"), "unknown optimizer 'Optimizer'"),
        (RunSettings(optimizer="Adam", momentum=0.9), "momentum has no effect: Adam has no such"),
        (
            RunSettings(optimizer="Adam", optimizer_options={"beta": 1}),
            "beta has no effect: Adam has no such option; did you mean 'betas'?",
        ),
        (
            RunSettings(optimizer="SGD", lr=0.1, optimizer_options={"lr": 0.2}),
            "lr is given twice, as --lr 0.1 and as --optimizer-option lr=0.2",
        ),
    ],
)
def test_what_cannot_be_had_or_has_no_effect_is_refused(
    settings: RunSettings, message: str
) -> None:
    with pytest.raises(TaskError) as caught:
        choose_optimizer(settings)
    assert message in str(caught.value)


def test_values_that_torch_refuses_are_told_with_its_reason() -> None:
    choice = choose_optimizer(RunSettings(optimizer="SGD", optimizer_options={"nesterov": True}))
    with raises(TaskError, "optimizer-not-built"):
        choice.build(parameters())
