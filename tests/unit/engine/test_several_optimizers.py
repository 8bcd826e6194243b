"""Several optimizers on one model, and several models that train each other."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import Gather
from dearmpi.engine.iteration import hooks
from dearmpi.errors import ConfigError, UsageError
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill
from tests.mpi.oracle import Case, Training, batch, cut
from tests.unit.engine.same_as_alone import assert_same_as_alone
from tests.unit.engine.stage import wait_for


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_two_optimizers_on_halves_of_one_model(gather: Gather) -> None:
    """One backprop feeds both; each steps at a pace of its own."""

    def script(training: Training) -> None:
        world, model = training.world, training.model
        params = list(model.parameters())
        halves: list[Any] = [
            torch.optim.SGD(params[0::2], lr=0.05, momentum=0.9),
            torch.optim.Adam(params[1::2], lr=0.01),
        ]
        if world is not None:
            training.optimizer.close()
            halves = [
                DistributedOptimizer(half, model, world=world, gather=gather) for half in halves
            ]
        for step in range(4):
            for half in halves:
                half.zero_grad()
            training.backward(step)
            halves[0].step()
            if step % 2:
                halves[1].step()
        if world is not None:
            for half in halves:
                half.close()

    assert_same_as_alone(script, Case(gather=gather))


@pytest.mark.parametrize("max_norm", [0.01, 1e9])
@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_gradients_of_two_optimizers_are_clipped_by_one_norm(
    gather: Gather, max_norm: float
) -> None:
    """As the guide from DDP says."""

    def script(training: Training) -> None:
        world, model = training.world, training.model
        params = list(model.parameters())
        optimizers: list[Any] = [
            torch.optim.SGD(half, lr=0.05, momentum=0.9) for half in (params[0::2], params[1::2])
        ]
        if world is not None:
            training.optimizer.close()
            optimizers = [
                DistributedOptimizer(one, model, world=world, gather=gather) for one in optimizers
            ]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            training.backward(step)
            if world is None:
                nn.utils.clip_grad_norm_(params, max_norm)
            else:
                norm = math.hypot(*(float(o.clip_grad_norm_(math.inf)) for o in optimizers))
                if norm > max_norm:
                    for optimizer in optimizers:
                        optimizer.scale_gradients_(max_norm / (norm + 1e-6))
            for optimizer in optimizers:
                optimizer.step()
        if world is not None:
            for optimizer in optimizers:
                optimizer.close()

    assert_same_as_alone(script, Case(gather=gather))


@pytest.mark.parametrize("who_drops", ["optimizer", "model"])
@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_two_models_that_train_each_other(gather: Gather, who_drops: str) -> None:
    """As in a GAN: backprop of one's loss leaves gradients in the other, which are dropped."""

    def train(world: World | None) -> list[Any]:
        maker = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 6)).double()
        judge = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        fill(maker)
        fill(judge)
        optimizers: list[Any] = [
            torch.optim.Adam(model.parameters(), lr=0.01) for model in (maker, judge)
        ]
        size, rank = (world.size, world.rank) if world else (1, 0)
        if world:
            optimizers = [
                DistributedOptimizer(optimizer, model, world=world, gather=gather)
                for optimizer, model in zip(optimizers, (maker, judge), strict=True)
            ]
        droppers: Sequence[Any] = optimizers if who_drops == "optimizer" else (maker, judge)
        for step in range(4):
            noise = batch(step, torch.float64)[0]
            noise = noise[cut(len(noise), size)[rank]]
            droppers[1].zero_grad()
            fake = maker(noise)
            loss = (judge(fake.detach()) + judge(noise[:, :6]).square()).sum() * size
            loss.backward()
            optimizers[1].step()
            droppers[0].zero_grad()
            (-judge(fake).sum() * size).backward()
            optimizers[0].step()
        found = [value.clone() for m in (maker, judge) for value in m.state_dict().values()]
        if world:
            for optimizer in optimizers:
                optimizer.zero_grad()
                optimizer.close()
        return found

    expected = train(None)
    for found in run_ranks(2, train):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("size", [1, 2])
def test_a_parameter_belongs_to_one_optimizer_until_that_is_closed(size: int) -> None:
    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        first = wrap(model, model[1], world)
        with raises(ConfigError, "parameter-taken", "parameter 1.weight"):
            wrap(model, model, world)
        other = wrap(model, model[0], world)
        first.fuse(1.0)  # lays out anew, and keeps what it has
        with raises(ConfigError, "parameter-taken", "1.weight"):
            wrap(model, model[1], world)
        for optimizer in (first, other, first):
            optimizer.close()
        second = wrap(model, model, world)
        first.close()  # once more, which takes nothing from the one that came after it
        with raises(ConfigError, "parameter-taken"):
            wrap(model, model, world)
        second.close()

    run_ranks(size, rank)


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_that_cannot_be_added_leave_the_optimizer_as_it_was(size: int) -> None:
    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        first, other = wrap(model, model[1], world), wrap(model, model[0], world)

        def changed_by(*optimizers: DistributedOptimizer) -> list[bool]:
            """Which parameters a step of theirs changes."""
            before = [param.detach().clone() for param in model.parameters()]
            model(torch.ones(2, 3)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            after = [param.detach() for param in model.parameters()]
            return [not one.equal(two) for one, two in zip(before, after, strict=True)]

        with raises(ConfigError, "parameter-taken", "0.weight"):
            first.add_param_group({"params": model[0].parameters(), "lr": 0.2})
        with raises(ConfigError, "parameters-not-in-model", "1"):
            first.add_param_group({"params": nn.Parameter(torch.zeros(2))})
        assert len(first.param_groups) == 1
        assert changed_by(first, other) == [True] * 4
        other.close()
        first.add_param_group({"params": model[0].parameters(), "lr": 0.2})
        assert changed_by(first) == [True] * 4
        first.close()

    run_ranks(size, rank)


def test_an_optimizer_of_several_models_is_told_how_to_pass_them() -> None:
    def rank(world: World) -> None:
        one, other = nn.Linear(3, 4), nn.Linear(4, 2)
        inner = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
        with raises(ConfigError, "parameters-not-in-model", "nn.ModuleList"):
            DistributedOptimizer(inner, one, world=world)
        DistributedOptimizer(inner, nn.ModuleList([one, other]), world=world).close()

    run_ranks(2, rank)


def test_what_is_forgotten_on_one_rank_claims_nothing() -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        wrap(model, model, world)
        gc.collect()
        wrap(model, model, world).close()

    run_ranks(1, rank)


def test_what_is_forgotten_on_several_ranks_is_still_to_be_closed() -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        wrap(model, model, world)
        gc.collect()
        with raises(ConfigError, "parameter-taken", "call close()"):
            wrap(model, model, world)

    run_ranks(2, rank)


@pytest.mark.parametrize("is_stepped", [True, False])
def test_a_backward_without_the_optimizer_that_would_average_it_is_refused(
    is_stepped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would add to a placeholder, which has no memory."""
    dropped: list[None] = []
    refuse = hooks._refuse_backprops

    def note(*args: Any) -> None:
        refuse(*args)
        dropped.append(None)

    monkeypatch.setattr(hooks, "_refuse_backprops", note)

    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        optimizer = wrap(model, model, world)
        model(torch.ones(1, 3)).sum().backward()
        if is_stepped:
            optimizer.step()
        del optimizer

        def is_over() -> bool:
            gc.collect()  # which does nothing while another thread is at it
            return len(dropped) == world.size

        wait_for(is_over, "the end of what both ranks dropped")
        with raises(UsageError, "optimizer-dropped", "close()"):
            model(torch.ones(1, 3))[0, :1].backward()

    run_ranks(2, rank)


def wrap(model: nn.Module, part: nn.Module, world: World) -> DistributedOptimizer:
    """An optimizer for ``part`` of ``model``."""
    return DistributedOptimizer(torch.optim.SGD(part.parameters(), lr=0.1), model, world=world)
