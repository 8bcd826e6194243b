"""Optimizers by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dearmpi.errors import TaskError
from dearmpi.train.loop.optimizers import (
    LrCurve,
    choose_optimizer,
    known_optimizers,
    lr_curve,
    parameter_groups,
)
from dearmpi.train.settings.choices import NoDecay
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
        (
            RunSettings(optimizer="Rprop", no_decay=("norms",)),
            "no_decay has no effect: Rprop has no such option",
        ),
        (
            RunSettings(optimizer="SGD", lr=0.1, no_decay=("norms",)),
            "no_decay has no effect: SGD has no weight decay by itself; give --weight-decay",
        ),
        (
            RunSettings(optimizer="torch.nn:Linear"),
            "torch.nn:Linear is not a class of torch.optim.Optimizer's kind",
        ),
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


def test_warm_up_rises_in_equal_parts_to_the_full_rate() -> None:
    curve = LrCurve("constant", total_steps=10, warmup_steps=4)
    assert [curve.factor(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_falls_from_one_to_zero_symmetrically() -> None:
    curve = LrCurve("cosine", total_steps=110, warmup_steps=10)
    assert curve.factor(10) == 1.0
    assert curve.factor(60) == pytest.approx(0.5)
    assert curve.factor(35) + curve.factor(85) == pytest.approx(1.0)
    assert curve.factor(110) == pytest.approx(0.0)
    factors = [curve.factor(step) for step in range(10, 111)]
    assert factors == sorted(factors, reverse=True)


def test_steps_drop_at_shares_of_the_run() -> None:
    settings = RunSettings(lr_schedule="step", lr_milestones=(0.3, 0.6), lr_gamma=0.5)
    curve = lr_curve(settings, total_steps=10, steps_per_epoch=5)
    assert [curve.factor(step) for step in (0, 2, 3, 5, 6, 9)] == [1, 1, 0.5, 0.5, 0.25, 0.25]


def test_warm_up_may_be_given_in_parts_of_an_epoch() -> None:
    curve = lr_curve(RunSettings(warmup_epochs=0.5), total_steps=100, steps_per_epoch=20)
    assert curve.warmup_steps == 10


def test_a_run_shorter_than_its_warm_up_stays_below_the_full_rate() -> None:
    curve = LrCurve("cosine", total_steps=5, warmup_steps=50)
    assert [curve.factor(step) for step in (0, 4)] == [0.02, 0.1]
    (note,) = curve.notes
    assert "rises over 50 steps, but the run has 5: it ends at 10% of --lr" in note
    assert not LrCurve("cosine", total_steps=5, warmup_steps=5).notes  # the full rate is reached


def test_a_drop_is_not_late_where_binary_numbers_are_not_exact() -> None:
    for percent in range(5, 100, 5):
        curve = LrCurve("step", total_steps=100, milestones=(percent / 100,), gamma=0.5)
        assert (curve.factor(percent - 1), curve.factor(percent)) == (1.0, 0.5)


class Norms(nn.Module):
    """Two norms, one of them with a class of its own, and biases of other names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.own = OwnRMSNorm(4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(1, 1).requires_grad_(False)


class OwnRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))


@pytest.mark.parametrize(
    ("no_decay", "expected"),
    [
        (("norms",), {"norm.weight", "norm.bias", "own.gain"}),
        (
            ("biases",),
            {"norm.bias", "attention.in_proj_bias", "attention.out_proj.bias", "head.bias"},
        ),
    ],
)
def test_groups_without_weight_decay(no_decay: tuple[NoDecay, ...], expected: set[str]) -> None:
    model = Norms()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    settings = RunSettings(optimizer="AdamW", weight_decay=0.5, no_decay=no_decay)
    optimizer = choose_optimizer(settings).build(parameter_groups(model, settings.no_decay))
    rest, free = (
        ({names[id(p)] for p in group["params"]}, group["weight_decay"])
        for group in optimizer.param_groups
    )
    assert free == (expected, 0.0) and rest[1] == 0.5
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert rest[0] == trained - expected


def test_a_model_without_such_parameters_is_refused() -> None:
    norms: tuple[NoDecay, ...] = ("norms",)
    with raises(TaskError, "setting-without-effect", "norms"):
        parameter_groups(nn.Linear(2, 2), norms)
    assert len(parameter_groups(nn.LayerNorm(2), norms)) == 1


def test_an_optimizer_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "import torch\n"
        "class Plain(torch.optim.SGD):\n"
        "    def __init__(self, params, lr, **more):\n"
        "        super().__init__(params, lr=lr, **more)\n"
        "class Broken(torch.optim.SGD):\n"
        "    def __init__(self, params, lr=0.5):\n"
        "        raise KeyError('no such thing')\n"
    )
    chosen = RunSettings(optimizer=f"{path}:Plain", lr=0.25, optimizer_options={"momentum": 0.5})
    choice = choose_optimizer(chosen)
    group = choice.build(parameters()).param_groups[0]
    assert (group["lr"], group["momentum"], choice.name) == (0.25, 0.5, f"{path}:Plain")
    with raises(TaskError, "optimizer-not-built", "--lr"):
        choose_optimizer(RunSettings(optimizer=f"{path}:Plain"))
    with raises(TaskError, "optimizer-not-built", "no such thing"):
        choose_optimizer(RunSettings(optimizer=f"{path}:Broken")).build(parameters())
    with raises(TaskError, "unknown-choice", "Plain"):
        choose_optimizer(RunSettings(optimizer=f"{path}:Plane"))


def test_a_schedule_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "def linear(step, total_steps):\n    return 1 - step / total_steps\n"
        "def wrong(step, total_steps):\n    return -1.0\n"
        "def broken(step):\n    return 1.0\n"
    )
    chosen = RunSettings(lr_schedule=f"{path}:linear", warmup_steps=2)
    curve = lr_curve(chosen, total_steps=10, steps_per_epoch=5)
    assert [curve.factor(step) for step in (0, 1, 2, 5)] == [0.5, 1.0, 0.8, 0.5]
    for name, code in (("wrong", "out-of-range"), ("broken", "task-code-failed")):
        own = RunSettings(lr_schedule=f"{path}:{name}")
        with raises(TaskError, code, name, 0, 10):
            lr_curve(own, total_steps=10, steps_per_epoch=5).factor(0)
