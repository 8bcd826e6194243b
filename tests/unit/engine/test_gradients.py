"""Gradients however a script makes them: what plain torch makes of it in one process is right."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dearmpi import DistributedOptimizer
from dearmpi.comm.fake import FakeClock, FakeHub, Fault
from dearmpi.comm.ranks import run_ranks
from dearmpi.comm.world import World
from dearmpi.errors import UsageError
from tests.mpi.models import fill
from tests.mpi.oracle import Case, Training, assert_same, batch, cut

Script = Callable[[Training], None]

WAYS = [
    Case(schedule=schedule, gather=gather, optimizer="adamw", groups=2)
    for schedule in ("dear", "wfbp", "serial")
    for gather in ("parameters", "gradients")
]
EVERY_WAY = pytest.mark.parametrize("case", WAYS, ids=lambda case: f"{case.schedule}-{case.gather}")


def assert_same_as_alone(script: Script, case: Case, size: int = 2) -> None:
    """``script`` on ``size`` ranks ends as it does in one process with plain torch."""
    alone = Training(case)
    script(alone)

    def rank(world: World) -> Any:
        with Training(case, world) as training:
            script(training)
            return training.outcome()

    for outcome in run_ranks(size, rank):
        assert_same(outcome, alone.outcome())


@EVERY_WAY
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_of_two_backprops_add_up(case: Case, size: int) -> None:
    def script(training: Training) -> None:
        for step in range(4):
            training.optimizer.zero_grad()
            training.backward(step)
            training.backward(step + 1)
            training.optimizer.step()

    assert_same_as_alone(script, case, size)


@EVERY_WAY
def test_a_backprop_after_clipping_adds_to_what_is_clipped(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(3):
            training.optimizer.zero_grad()
            training.backward(step)
            training.clip(2.0)
            training.backward(step + 1)
            training.clip(float("inf"))
            training.backward(step + 2)
            training.optimizer.step()

    assert_same_as_alone(script, case)


@EVERY_WAY
def test_backprops_that_use_different_branches_add_up(case: Case) -> None:
    """Some samples, on some ranks, take the branch in the first backprop, others in the second."""

    def script(training: Training) -> None:
        for first, second in ((0, 2), (1, 0), (3, 5), (1, 4), (2, 1)):
            training.optimizer.zero_grad()
            training.backward(first)
            training.backward(second)
            training.optimizer.step()

    assert_same_as_alone(script, replace(case, model="branches"), size=3)


@EVERY_WAY
def test_gradients_dropped_by_zero_grad_leave_no_trace(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(3):
            training.optimizer.zero_grad()
            training.backward(step + 7)
            training.optimizer.zero_grad()
            training.optimizer.zero_grad()
            training.backward(step)
            training.optimizer.step()
        training.backward(9)
        training.optimizer.zero_grad()

    assert_same_as_alone(script, replace(case, model="branches"))


@EVERY_WAY
def test_a_step_without_backprop_changes_nothing(case: Case) -> None:
    def script(training: Training) -> None:
        training.optimizer.step()
        training.step(0)
        training.optimizer.zero_grad()
        training.optimizer.step()
        training.optimizer.step()
        training.step(1)

    assert_same_as_alone(script, case)


@EVERY_WAY
def test_a_step_after_no_sync_alone_uses_what_all_ranks_have_gathered(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(3):
            training.optimizer.zero_grad()
            with training.no_sync():
                training.backward(step)
                training.backward(step + 1)
            training.optimizer.step()

    assert_same_as_alone(script, replace(case, model="branches"))


@EVERY_WAY
def test_local_gradients_are_dropped_by_zero_grad(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(3):
            with training.no_sync():
                training.backward(step + 7)
            training.optimizer.zero_grad()
            with training.no_sync():
                training.backward(step + 1)
            training.backward(step)
            training.optimizer.step()
            training.optimizer.zero_grad()

    assert_same_as_alone(script, case)


@pytest.mark.parametrize("schedule", ["dear", "wfbp", "serial"])
def test_no_sync_after_a_synchronizing_backprop_is_refused(schedule: str) -> None:
    def rank(world: World) -> None:
        with Training(Case(schedule=schedule), world) as training:
            training.step(0)
            training.backward(1)
            with pytest.raises(UsageError, match="no_sync"), training.no_sync():
                training.backward(2)
            training.optimizer.zero_grad()

    run_ranks(2, rank)


@EVERY_WAY
def test_zero_grad_to_zeros(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(3):
            training.optimizer.zero_grad(set_to_none=False)
            with training.no_sync():
                training.backward(step + 1)
            training.backward(step)
            training.optimizer.step()

    assert_same_as_alone(script, case)


@EVERY_WAY
def test_a_closure_is_evaluated_with_gradients_before_the_step(case: Case) -> None:
    losses: list[float] = []

    def script(training: Training) -> None:
        for step in range(3):

            def closure(step: int = step) -> Any:
                training.optimizer.zero_grad()
                loss = training.loss(step)
                loss.backward()
                return loss

            with torch.no_grad():
                losses.append(float(training.optimizer.step(closure)))

    assert_same_as_alone(script, case)
    assert len(losses) == 9 and losses[0] == pytest.approx((losses[3] + losses[4]) / 2, abs=1)


@EVERY_WAY
def test_gradients_set_by_hand_are_averaged(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(3):
            training.optimizer.zero_grad()
            rank = training.world.rank if training.world else 0.5
            for number, param in enumerate(training.model.parameters()):
                param.grad = torch.full_like(param, number + step + rank)
            training.optimizer.step()

    assert_same_as_alone(script, case)


@EVERY_WAY
def test_options_are_read_at_the_step(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(4):
            training.optimizer.zero_grad()
            training.backward(step)
            for group in training.optimizer.param_groups:
                group["lr"] = 0.01 * (step + 1)
            training.optimizer.step()
            for group in training.optimizer.param_groups:
                group["lr"] = 1000.0  # too late for this step

    assert_same_as_alone(script, case)


@EVERY_WAY
def test_feed_forward_without_backprop_disturbs_nothing(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(3):
            training.step(step)
            training.loss(step)
            with torch.no_grad():
                training.loss(step + 1)
            training.model.eval()
            training.loss(step)
            training.model.train()

    assert_same_as_alone(script, case)


@EVERY_WAY
def test_two_feed_forwards_of_one_backprop(case: Case) -> None:
    def script(training: Training) -> None:
        for step in range(3):
            training.optimizer.zero_grad()
            (training.loss(step) + training.loss(step + 1)).backward()
            training.optimizer.step()

    assert_same_as_alone(script, case)


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


class Recomputing(nn.Module):
    """Two halves, whose activations are computed again during backprop."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12)).double()
            for _ in range(3)
        )
        fill(self)

    def forward(self, inputs: torch.Tensor) -> Any:
        for half in self.halves:
            inputs = checkpoint(half, inputs, use_reentrant=False)
        return inputs


@pytest.mark.parametrize("cap_mb", [1e-6, 0.002, 1.0])
@pytest.mark.parametrize("eager", [False, True])
def test_activation_checkpointing(eager: bool, cap_mb: float) -> None:
    """Modules are called once more, in the middle of backprop."""

    def train(model: nn.Module, optimizer: Any, share: Callable[[int], slice], scale: int) -> Any:
        for step in range(4):
            inputs = batch(step, torch.float64)[0]
            optimizer.zero_grad()
            loss = model(inputs[share(len(inputs))]).square().sum() * scale
            loss.backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    alone = Recomputing()
    expected = train(alone, torch.optim.SGD(alone.parameters(), lr=0.001), slice, 1)

    def rank(world: World) -> Any:
        model = Recomputing()
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.001),
            model,
            world=world,
            eager=eager,
            bucket_cap_mb=cap_mb,
        )
        found = train(model, optimizer, lambda n: cut(n, world.size)[world.rank], world.size)
        optimizer.close()
        return found

    for found in run_ranks(2, rank):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_two_optimizers_on_halves_of_one_model(gather: str) -> None:
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


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_two_models_that_train_each_other(gather: str) -> None:
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
        for step in range(4):
            noise = batch(step, torch.float64)[0]
            noise = noise[cut(len(noise), size)[rank]]
            optimizers[1].zero_grad()
            fake = maker(noise)
            loss = (judge(fake.detach()) + judge(noise[:, :6]).square()).sum() * size
            loss.backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
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


def test_an_eager_second_backprop_is_refused() -> None:
    def rank(world: World) -> None:
        training = Training(Case(eager=True, cap_mb=1.0), world)
        training.step(0)
        training.backward(1)
        with pytest.raises(UsageError, match="eager"):
            training.backward(2)

    run_ranks(2, rank)


@pytest.mark.parametrize("act", ["zero_grad", "clip"])
def test_eager_gradients_can_be_neither_dropped_nor_clipped(act: str) -> None:
    def rank(world: World) -> None:
        training = Training(Case(eager=True), world)
        training.step(0)
        training.backward(1)
        with pytest.raises(UsageError, match="eager=False"):
            training.optimizer.zero_grad() if act == "zero_grad" else training.clip(2.0)

    run_ranks(2, rank)


def test_gradients_under_way_cannot_be_read_unnoticed() -> None:
    """torch's own clipping would find nothing to clip, and say nothing."""

    def rank(world: World) -> None:
        with Training(Case(), world) as training:
            training.backward(0)
            with pytest.raises(UsageError, match=r"optimizer\.clip_grad_norm_"):
                nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
            training.optimizer.zero_grad()

    run_ranks(2, rank)


def test_gradients_cleared_behind_the_optimizer_s_back_are_noticed() -> None:
    def rank(world: World) -> None:
        training = Training(Case(), world)
        training.backward(0)
        training.model.zero_grad()
        with pytest.raises(UsageError, match=r"optimizer\.zero_grad"):
            training.optimizer.step()

    run_ranks(2, rank)


class Detour(nn.Module):
    """Two layers, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        fill(self)

    def forward(self, inputs: torch.Tensor, *, whole: bool) -> Any:
        hidden = self.first(inputs)
        return (self.second(hidden) if whole else hidden).square().mean()


def test_a_roll_call_that_comes_late_does_not_speak_for_the_next_step() -> None:
    """Rank 0 hears only during the second backprop that all had gradients in the first."""
    clock = FakeClock()
    together = threading.Barrier(2)

    def poll(world: World, *, seconds: float = 0.0) -> None:
        """Let all ranks post what they can, then let rank 0 hear what it may by now."""
        for _ in range(5):
            world.progress.poll()
            together.wait(10)
        if world.is_root:
            clock.advance(seconds)
            world.progress.poll()
        together.wait(10)

    def train(world: World | None) -> list[Any]:
        model = Detour()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        if world is not None:
            optimizer = DistributedOptimizer(optimizer, model, world=world)
        for whole in (True, False, True):
            optimizer.zero_grad()
            model(torch.ones(1, 3), whole=whole).backward()
            if world is not None and not whole:
                poll(world, seconds=1.0)  # the first roll call arrives
            optimizer.step()
            if world is not None and not whole:
                poll(world)  # everything arrives but the second roll call
                poll(world, seconds=1.0)
        return [value.clone() for value in model.state_dict().values()]

    late = [Fault(0, "delay", nth=nth, label="AR", delay_s=1.0) for nth in (1, 2)]
    expected = train(None)
    hub = FakeHub(2, clock=clock.now, faults=late)
    for found in run_ranks(2, train, hub=hub, progress="poll"):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
