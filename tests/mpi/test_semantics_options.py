"""Schedulers, parameter groups, averaged weights, and several optimizers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from dearmpi.comm.world import World
from tests.mpi.models import NUM_FEATURES, squared_error
from tests.mpi.semantics import (
    NUM_STEPS,
    SEMANTICS,
    Side,
    adam,
    assert_same_on_both_sides,
    layers,
    outcome,
    seeded,
    train,
    whole_batch,
)

pytestmark = SEMANTICS


@pytest.mark.parametrize(
    "build",
    [
        lambda optimizer: CosineAnnealingLR(optimizer, T_max=3),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=NUM_STEPS + 1),
        lambda optimizer: SWALR(optimizer, swa_lr=0.05, anneal_epochs=2),
    ],
    ids=["cosine", "one cycle with betas", "swa"],
)
def test_learning_rate_schedulers(build: Any, gather: str, world: World) -> None:
    """The rate of a step is the one that was set when it was taken."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        scheduler = build(optimizer)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            side.loss(model, step).backward()
            optimizer.step()
            scheduler.step()
            model(whole_batch(9))
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


def test_options_are_read_at_the_step_and_not_later(gather: str, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        for step in range(NUM_STEPS):
            optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
            optimizer.param_groups[0]["betas"] = (0.5 + 0.1 * step, 0.9)
            train(side, model, optimizer, 1)
            optimizer.param_groups[0]["lr"] = 1e9  # too late for the step that was taken
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


class Damped(LRScheduler):
    """Lowers the rate by what the optimizer's state says."""

    def entries(self) -> list[Any]:
        """The state of every parameter."""
        return list(self.optimizer.state_dict()["state"].values())

    def get_lr(self) -> list[float | Tensor]:
        """As the base class."""
        total = sum(float(entry["exp_avg_sq"].sum()) for entry in self.entries())
        return [base / (1.0 + total) for base in self.base_lrs]


class DampedByReading(Damped):
    """The same, through ``optimizer.state``."""

    def entries(self) -> list[Any]:
        """The state of every parameter."""
        groups = self.optimizer.param_groups
        state = self.optimizer.state
        return [state[param] for group in groups for param in group["params"] if param in state]


def train_damped(kind: type[Damped], gather: str, world: World) -> None:
    """Train with such a scheduler; the numbers must be those of one process."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        scheduler = kind(optimizer)
        for _ in range(NUM_STEPS):
            train(side, model, optimizer, 1)
            scheduler.step()
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


def test_a_scheduler_that_reads_the_state_dict(gather: str, world: World) -> None:
    train_damped(Damped, gather, world)


def test_a_scheduler_that_reads_optimizer_state(gather: str, world: World) -> None:
    """Each rank has but a shard of it."""
    train_damped(DampedByReading, gather, world)


@pytest.mark.ranks(2, 3)
def test_optimizer_state_cannot_be_changed_in_vain(gather: str, world: World) -> None:
    """A copy that could be written to would swallow the change."""
    model = layers()
    side = Side(world, gather=gather)
    optimizer = side.wrap(adam(model), model)
    train(side, model, optimizer, 1)
    with pytest.raises(TypeError):
        optimizer.state[model[0].weight]["step"] = 0
    with pytest.raises(TypeError):
        optimizer.state[model[0].weight] = {}
    side.close()


def test_an_optimizer_whose_state_is_cleared_begins_anew(gather: str, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(2):
            train(side, model, optimizer, 2)
            scheduler.step()
            optimizer.state.clear()
        train(side, model, optimizer, 1)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


def test_state_of_a_parameter_without_elements_is_shown(gather: str, world: World) -> None:
    """torch's Adagrad makes it at the start, and fails without."""
    model = layers()
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, dtype=torch.float64)))
    side = Side(world, gather=gather)
    optimizer = side.wrap(torch.optim.Adagrad(model.parameters()), model)
    train(side, model, optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    train(side, model, optimizer, 1)
    assert sorted(optimizer.state_dict()["state"]) == list(range(len(list(model.parameters()))))
    side.close()
    plain = torch.optim.Adagrad(model.parameters())
    plain.load_state_dict(state)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    plain.step()


def test_every_parameter_is_updated_once_and_by_its_own_group(gather: str, world: World) -> None:
    """Not by every group in turn."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
            {"params": [model[4].weight, model[0].weight], "lr": 0.03, "betas": (0.7, 0.9)},
            {"params": [model[2].weight], "amsgrad": True},
        ]
        optimizer = side.wrap(torch.optim.AdamW(groups, lr=0.01, weight_decay=0.2), model)
        train(side, model, optimizer)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather, bucket_cap_mb=1.0)


def test_averaged_weights_read_current_parameters(gather: str, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        average = get_ema_multi_avg_fn(0.5)
        ema = AveragedModel(model, multi_avg_fn=average)
        for _ in range(NUM_STEPS):
            train(side, model, optimizer, 1)
            ema.update_parameters(model)
        averages = {f"ema.{name}": value for name, value in ema.state_dict().items()}
        return {**averages, "evaluation": ema(whole_batch(9)), **outcome(model, optimizer)}

    assert_same_on_both_sides(script, world, gather=gather)


def test_statistics_for_averaged_weights(gather: str, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = seeded(
            lambda: nn.Sequential(nn.Linear(NUM_FEATURES, 5), nn.Tanh(), nn.Linear(5, 3))
        )
        optimizer = side.wrap(adam(model), model)
        swa = AveragedModel(nn.Sequential(model, nn.BatchNorm1d(3, affine=False).double()))
        train(side, model, optimizer, 2)
        swa.update_parameters(nn.Sequential(model, nn.BatchNorm1d(3).double()))
        update_bn([whole_batch(step) for step in range(3)], swa)
        return {f"swa.{name}": value for name, value in swa.state_dict().items()}

    assert_same_on_both_sides(script, world, gather=gather)


def test_two_optimizers_on_disjoint_halves_of_one_model(gather: str, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        model.register_parameter("scale", scale)
        params = [param for param in model.parameters() if param is not scale]
        half, rest = params[:3], [*params[3:], scale]
        optimizers = [
            side.wrap(torch.optim.Adam(half, lr=0.01), model),
            side.wrap(torch.optim.SGD(rest, lr=0.02, momentum=0.9), model),
        ]
        for step in range(NUM_STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (side.loss(model, step) * model.get_parameter("scale")).backward()
            for optimizer in optimizers[:: 1 if step % 2 else -1]:
                optimizer.step()
        return {**outcome(model, optimizers[0]), **rename(outcome(model, optimizers[1]))}

    assert_same_on_both_sides(script, world, gather=gather)


def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"second.{name}": value for name, value in tensors.items()}


@pytest.mark.parametrize("freezes", [True, False], ids=["critic frozen", "critic not frozen"])
def test_two_models_that_train_through_each_other(freezes: bool, gather: str, world: World) -> None:
    """A GAN: the generator's backprop passes through the critic, and must not move it."""

    def script(side: Side) -> dict[str, Tensor]:
        generator, critic = (
            layers(),
            seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))),
        )
        for_generator = side.wrap(adam(generator), generator)
        for_critic = side.wrap(adam(critic), critic)
        for step in range(NUM_STEPS):
            noise, real = side.inputs(step), side.inputs(step + 20)[:, :3]
            for_critic.zero_grad()
            made = generator(noise)
            side.average(critic(made.detach()).sum() - critic(real).sin().sum()).backward()
            for_critic.step()
            for_generator.zero_grad()
            critic.requires_grad_(not freezes)
            side.average(squared_error(critic(made))).backward()
            critic.requires_grad_(True)
            for_generator.step()
        for_critic.zero_grad()
        return {**outcome(generator, for_generator), **rename(outcome(critic, for_critic))}

    assert_same_on_both_sides(script, world, gather=gather)


def test_a_gradient_penalty(gather: str, world: World) -> None:
    """Backprop through a backprop, to inputs and to parameters, before and after a backward."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            inputs = side.inputs(step).requires_grad_()
            (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
            (side.loss(model, step) + side.average(squared_error(slope))).backward()
            # Looking at gradients without accumulating them changes nothing.
            torch.autograd.grad(side.loss(model, step + 5), list(model.parameters()))
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)
