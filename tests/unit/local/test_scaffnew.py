"""Scaffnew as an optimizer: what ``ClientRounds`` computes, saved, resumed and refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import EngineConfig, Scaffnew
from dearmpi.comm.world import World
from dearmpi.engine.trace.spans import Traffic
from dearmpi.errors import (
    CheckpointError,
    DearError,
    MismatchError,
    NonFiniteLossError,
    UsageError,
)
from dearmpi.local.client_rounds import ClientRounds
from dearmpi.plan.data.local_schedule import RoundRule
from tests.codes import raises
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks

NUM_FEATURES = 7


class Plane(nn.Module):
    """Two parameters, so that masks go on from one to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_FEATURES, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros((), dtype=torch.float64))


def rows_of(client: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(client)
    x = torch.randn(9, NUM_FEATURES, generator=generator, dtype=torch.float64)
    return x, x.sum(1) * client + client


def loss_of(client: int, weight: Tensor, bias: Tensor) -> Tensor:
    x, y = rows_of(client)
    return (x @ weight + bias - y).square().mean() / 2 + 0.05 * weight.square().sum()


def backward(model: Plane, rank: int) -> None:
    model.zero_grad()
    torch.autograd.backward(loss_of(rank, model.weight, model.bias))


@pytest.mark.parametrize(
    ("size", "sparsity", "cohort"), [(1, None, None), (2, None, None), (4, 2, None), (4, 2, 3)]
)
def test_an_optimizer_computes_what_clients_do(
    size: int, sparsity: int | None, cohort: int | None
) -> None:
    def train(world: World) -> None:
        model = Plane()
        optimizer = Scaffnew(
            model.parameters(), model, lr=0.1, p=0.4, sparsity=sparsity, cohort=cohort, world=world
        )
        while optimizer.num_rounds < 20:
            if optimizer.takes_part:
                backward(model, world.rank)
            optimizer.step()
        rounds = ClientRounds(torch.zeros(NUM_FEATURES + 1).double(), optimizer.rule, world=world)

        def gradient(client: int, point: Tensor) -> Tensor:
            point.requires_grad_()
            loss = loss_of(client, point[:NUM_FEATURES], point[NUM_FEATURES])
            return torch.autograd.grad(loss, point)[0]

        for _ in range(20):
            rounds.run(gradient)
        found = torch.cat([model.weight.detach(), model.bias.detach()[None]])
        torch.testing.assert_close(found, rounds.shared, rtol=1e-11, atol=1e-12)
        control = torch.cat([optimizer.controls["weight"], optimizer.controls["bias"][None]])
        torch.testing.assert_close(control, rounds.controls[world.rank], rtol=1e-10, atol=1e-12)
        optimizer.close()
        rounds.close()

    run_ranks(size, train)


class Layers(nn.Module):
    """Parameters that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in {
            "first": (37, 11),
            "second": (5,),
            "third": (),
            "last": (1001,),
        }.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(value))


@pytest.mark.parametrize(
    ("size", "sparsity", "cohort"), [(3, 2, 3), (4, 2, 4), (4, 2, 3), (5, 3, 5), (5, 2, 4)]
)
def test_only_what_masks_keep_is_sent_and_the_averages_are_those_of_whole_values(
    size: int, sparsity: int, cohort: int
) -> None:
    hub = FakeHub(size, name=lambda buffer: f" {buffer.numel() * buffer.element_size()}")

    def train(world: World, config: EngineConfig | None) -> tuple[Layers, int]:
        model = Layers()
        optimizer = Scaffnew(
            model.parameters(),
            model,
            lr=0.1,
            p=0.5,
            sparsity=sparsity,
            cohort=cohort,
            world=world,
            config=config,
        )
        generator = torch.Generator().manual_seed(world.rank)
        before = len(hub.records)
        while optimizer.num_rounds < 12:
            for param in model.parameters():
                noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
                param.grad = param.detach() - world.rank + noise
            optimizer.step()
        total = sum(param.numel() for param in model.parameters()) * 8
        shard = -(-total // 8 // size) * 8
        sent = [record for record in hub.records[before:] if record.rank == world.rank]
        if config is None:
            shares = [int(one.label[3:]) for one in sent if one.label.startswith("EX")]
            most = -(-shard // 8 * sparsity // cohort) * 8
            assert shares == [size * most] * 12 and most < shard
            wholes = [int(one.label[3:]) for one in sent if one.label.startswith("AG")]
            assert wholes == [size * shard] * 12
            others = size - 1
            assert optimizer.traffic == Traffic(others * most, others * shard, 2 * others * shard)
            assert optimizer.waited_s > 0
        else:
            assert not any(one.label.startswith("EX") for one in sent)
        reduced = optimizer.traffic.reduced
        optimizer.close()
        return model, reduced

    def compare(world: World) -> Layers:
        (masked, few), (whole, many) = (
            train(world, config) for config in (None, EngineConfig(window=1))
        )
        assert few < many
        for one, other in zip(masked.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
        return masked

    first, *others = run_ranks(size, compare, hub=hub)
    for other in others:
        for one, same in zip(other.parameters(), first.parameters(), strict=True):
            assert torch.equal(one, same)


@pytest.mark.parametrize("config", [None, EngineConfig(window=1)])
def test_what_no_rank_moves_keeps_its_bits(config: EngineConfig | None) -> None:
    """Frozen parameters are averaged as well, since they may be trained later."""

    def train(world: World) -> None:
        model: Any = Plane()
        generator = torch.Generator().manual_seed(3)
        model.frozen = nn.Parameter(torch.randn(99, generator=generator).double() / 3, False)
        start = model.frozen.detach().clone()
        optimizer = Scaffnew(
            model.parameters(), model, lr=0.1, p=0.5, sparsity=7, world=world, config=config
        )
        while optimizer.num_rounds < 5:
            backward(model, world.rank)
            optimizer.step()
        optimizer.close()
        assert torch.equal(model.frozen, start)

    run_ranks(8, train)


@pytest.mark.parametrize(("size", "sparsity"), [(2, None), (3, 2)])
def test_a_resumed_run_goes_on_bit_for_bit(size: int, sparsity: int | None) -> None:
    def build(world: World) -> tuple[Plane, Scaffnew]:
        model = Plane()
        settings: dict[str, Any] = {"lr": 0.1, "p": 0.3, "sparsity": sparsity}
        return model, Scaffnew(model.parameters(), model, world=world, **settings)

    def train(world: World) -> None:
        (whole, first), (parted, second) = build(world), build(world)
        for step in range(30):
            for model, optimizer in ((whole, first), (parted, second)):
                backward(model, world.rank)
                optimizer.step()
            if step == 13:
                state = copy.deepcopy(second.state_dict())
                second.close()
                parted, second = build(world)
                second.load_state_dict(state)
        assert torch.equal(whole.weight, parted.weight)
        state["local"]["rank"] += 1
        with raises(CheckpointError, "state-of-other-model", world.rank + 1):
            second.load_state_dict(state)
        with raises(CheckpointError, "state-of-other-model"):
            second.load_state_dict({"state": {}, "param_groups": []})
        first.close()
        second.close()

    run_ranks(size, train)


def test_on_other_ranks_control_variates_begin_anew_and_find_the_optimum() -> None:
    """Two ranks stop in the middle of a round, and three find the optimum of three."""

    def go_on(world: World, num_steps: int, state: Any = None) -> tuple[Any, Tensor, Tensor]:
        model = Plane()
        optimizer = Scaffnew(model.parameters(), model, lr=0.2, p=0.3, world=world)
        if state is not None:
            optimizer.load_state_dict(copy.deepcopy(state))
            assert torch.equal(model.weight, state["local"]["anchor"]["weight"])
            assert not any(control.any() for control in optimizer.controls.values())
        for _ in range(num_steps):
            backward(model, world.rank)
            optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        control = optimizer.controls["weight"].clone()
        with optimizer.at_anchor():
            found = torch.cat([model.weight.detach(), model.bias.detach()[None]])
        optimizer.close()
        return saved, found.clone(), control

    (state, before, _), _ = run_ranks(2, lambda world: go_on(world, 14))
    assert state["local"]["steps_in_round"] > 0
    with pytest.warns(UserWarning, match="control variates of 2 ranks do not fit the data of 3"):
        resumed = run_ranks(3, lambda world: go_on(world, 600, state))
    optimum = torch.zeros(NUM_FEATURES + 1, dtype=torch.float64)
    total = lambda at: sum(loss_of(one, at[:-1], at[-1]) for one in range(3))  # noqa: E731
    hessian = torch.autograd.functional.hessian(total, optimum)
    slope = torch.autograd.functional.jacobian(total, optimum)
    optimum = -torch.linalg.solve(hessian, slope)
    for _, found, _ in resumed:
        assert float((found - optimum).norm()) < 1e-4 * float((before - optimum).norm())
    controls = torch.stack([control for *_, control in resumed])
    assert float(controls.sum(0).abs().max()) < 1e-12 * float(controls.abs().max() + 1)
    assert float(controls.abs().max()) > 0.1


@pytest.mark.parametrize("sparsity", [None, 2])
def test_numbers_that_are_not_finite_are_found_at_the_exchange(sparsity: int | None) -> None:
    def train(world: World) -> None:
        model = Plane()
        optimizer = Scaffnew(
            model.parameters(), model, lr=0.1, p=0.5, sparsity=sparsity, world=world
        )
        if world.rank == 1:
            model.bias.data.fill_(float("inf"))
        with raises(NonFiniteLossError, "not-finite", "rank 1 on ", "bias"):
            while optimizer.num_rounds < 2:
                optimizer.step()
        optimizer.close()

    run_ranks(3, train)


def test_lr_and_p_follow_from_smoothness() -> None:
    def build(world: World) -> None:
        model = Plane()
        optimizer = Scaffnew(model.parameters(), model, smoothness=(4.0, 0.25), world=world)
        assert optimizer.rule == RoundRule(3, 2 / 4.25, 0.25, 3, 3)
        assert optimizer.rule.eta == pytest.approx(0.25)
        optimizer.close()

    run_ranks(3, build)


def test_ranks_with_other_settings_are_told() -> None:
    def build(world: World) -> None:
        model = Plane()
        with raises(MismatchError, "ranks-built-differently"):
            Scaffnew(model.parameters(), model, lr=0.1 + world.rank, world=world)

    run_ranks(2, build)


def _change_lr(optimizer: Scaffnew) -> None:
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


MISUSES: list[Callable[[Any], Any]] = [
    lambda optimizer: optimizer.step(lambda: 0.0),
    lambda optimizer: optimizer.join(),
    lambda optimizer: optimizer.add_param_group({"params": []}),
    _change_lr,
]


@pytest.mark.parametrize("misuse", MISUSES)
def test_what_it_does_not_have_is_refused(misuse: Callable[[Any], Any]) -> None:
    def train(world: World) -> None:
        model = Plane()
        optimizer = Scaffnew(model.parameters(), model, lr=0.1, world=world)
        backward(model, world.rank)
        with raises(UsageError, "local-steps-forbid"):
            misuse(optimizer)
        optimizer.close()
        optimizer.close()
        optimizer.param_groups[0]["lr"] = 0.1
        with raises(DearError, "optimizer-closed"):
            optimizer.step()

    run_ranks(2, train)


@pytest.mark.parametrize("sparsity", [3, 2])
def test_the_optimum_is_found_of_what_one_rank_does_not_use(sparsity: int) -> None:
    """Its gradient is zero there, and its control variate goes back to zero."""
    curvature, center = (1.0, 2.0, 4.0), (5.0, -1.0, 0.5)

    def train(world: World) -> tuple[Tensor, Tensor]:
        model, own = Plane(), world.rank
        optimizer = Scaffnew(
            model.parameters(), model, lr=0.2, p=0.4, sparsity=sparsity, world=world
        )
        while optimizer.num_rounds < 150:
            model.zero_grad()
            loss = curvature[own] * (model.bias - center[own]).square() / 2
            if own < 2:
                loss = loss + curvature[own] * (model.weight - center[own]).square().sum() / 2
            torch.autograd.backward(loss)
            optimizer.step()
        with optimizer.at_anchor():
            found = model.weight.detach().clone(), model.bias.detach().clone()
        optimizer.close()
        return found

    for weight, bias in run_ranks(3, train):
        torch.testing.assert_close(weight, torch.full_like(weight, 1.0), rtol=1e-10, atol=0.0)
        torch.testing.assert_close(bias, torch.full_like(bias, 5 / 7), rtol=1e-10, atol=0.0)


def test_what_is_frozen_while_training_stays_as_it_is() -> None:
    def train(world: World) -> None:
        model = Plane()
        optimizer = Scaffnew(model.parameters(), model, lr=0.1, p=0.4, sparsity=2, world=world)
        for _ in range(10):
            backward(model, world.rank)
            optimizer.step()
        while optimizer._steps_in_round:
            optimizer.step()
        model.bias.requires_grad_(False)
        before = model.bias.clone()
        for _ in range(10):
            backward(model, world.rank)
            optimizer.step()
        assert torch.equal(model.bias, before)
        optimizer.close()

    run_ranks(3, train)
