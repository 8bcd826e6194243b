"""Replayed models: their parameters, the time they take, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from dearmpi.bench.replay import Pacer, ReplayModel
from dearmpi.plan.data.workload import LayerSpec, Workload, float_layer, read_workload
from dearmpi.plan.model.profile import profile_workload

# Words that a replayed model might use for itself.
ATTRIBUTES = ("order", "used", "pace", "work", "gradient", "feed_forward_s", "backprop_s", "tie")


@dataclass
class Clock:
    """Time that passes in sleeps only, each of which lasts ``late_s`` too long."""

    late_s: float = 0.0
    now_s: float = 0.0
    sleeps: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds + self.late_s

    def pace(self) -> Pacer:
        return Pacer(clock=self.now, sleep=self.sleep)


def replay(name: str, clock: Clock, *, feed_forward_s: float, backprop_s: float) -> nn.Module:
    profile = profile_workload(
        read_workload(name), feed_forward_s=feed_forward_s, backprop_s=backprop_s
    )
    return ReplayModel(profile, gradient=0.5, pace=clock.pace())


@pytest.mark.parametrize("name", ["resnet50", "densenet201", "bert_base"])
def test_parameters_have_true_names_and_shapes_in_order(name: str) -> None:
    model = replay(name, Clock(), feed_forward_s=0, backprop_s=0)
    expected = [(spec.name, spec.shape) for spec in read_workload(name).params()]
    assert [(n, tuple(p.shape)) for n, p in model.named_parameters()] == expected


@pytest.mark.parametrize("name", ["resnet50", "densenet201"])
def test_times_add_up_however_late_sleeps_return(name: str) -> None:
    clock = Clock(late_s=0.0005)
    model = replay(name, clock, feed_forward_s=1.0, backprop_s=2.0)
    loss = model(torch.zeros(1, requires_grad=True)).sum()
    fed_s = clock.now_s
    loss.backward()
    # The last sleep's delay is all that is left over, and no layer may be cut short for it.
    assert fed_s == pytest.approx(1.0, abs=0.002)
    assert clock.now_s == pytest.approx(3.0, abs=0.002)


def test_a_layer_takes_the_share_of_its_flops() -> None:
    workload = read_workload("resnet50")
    clock = Clock()
    model = replay("resnet50", clock, feed_forward_s=1.0, backprop_s=2.0)
    loss = model(torch.zeros(1, requires_grad=True)).sum()
    shares = [share for share in workload.shares() if share]
    assert clock.sleeps == pytest.approx(shares)
    clock.sleeps.clear()
    loss.backward()
    assert clock.sleeps == pytest.approx([2 * share for share in reversed(shares)])


def test_a_long_delay_is_not_made_up_for() -> None:
    clock = Clock()
    pace = clock.pace()
    clock.now_s += 5.0  # somebody held the process up for most of this
    pace.spend(1.0, since=0.0)
    start = clock.now_s
    for _ in range(10):
        pace.spend(0.1, since=clock.now())
    assert clock.now_s - start > 0.98


def test_time_spent_on_work_counts_as_the_layers_own() -> None:
    clock = Clock()
    pace = clock.pace()
    clock.now_s += 0.3
    pace.spend(1.0, since=0.0)
    assert clock.now_s == pytest.approx(1.0)


def test_gradients_are_real_and_a_tied_one_counts_twice() -> None:
    layers = (
        float_layer("embedding", {"weight": (5, 2)}, 0),
        float_layer("block.dense", {"weight": (2, 2), "bias": (2,)}, 1),
        LayerSpec("decoder", (), 3, uses=("embedding.weight",)),
    )
    workload = Workload("small", "", layers, batch_size=1, unit="seq")
    profile = profile_workload(workload, feed_forward_s=0, backprop_s=0)
    model = ReplayModel(profile, gradient=0.5)
    model(torch.zeros(1, requires_grad=True)).sum().backward()
    tied = {name for layer in workload.layers for name in layer.uses}
    assert tied == {"embedding.weight"}
    assert model.get_submodule("decoder").weight is model.get_submodule("embedding").weight
    for name, param in model.named_parameters():
        expected = 1.0 if name in tied else 0.5
        assert param.grad is not None and param.grad.shape == param.shape
        assert bool((param.grad == expected).all()), name


@pytest.mark.parametrize("taken", ATTRIBUTES)
def test_parts_and_parameters_may_have_any_name(taken: str) -> None:
    layers = (
        float_layer(taken, {"weight": (2,)}, 1),
        float_layer(f"{taken}.{taken}", {"weight": (3,)}, 1),
        float_layer("head", {taken: (4,)}, 1),
        LayerSpec("decoder", (), 1, uses=(f"head.{taken}",)),
    )
    workload = Workload("small", "", layers, batch_size=1, unit="seq")
    model = ReplayModel(profile_workload(workload, feed_forward_s=0, backprop_s=0))
    model(torch.zeros(1, requires_grad=True)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
