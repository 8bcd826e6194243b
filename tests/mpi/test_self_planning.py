"""plan="auto": a job profiles its first steps, plans beside its training, and goes on by that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.engine.setup import self_planning
from dearmpi.engine.setup.self_planning import MOST_STEPS
from dearmpi.errors import ConfigError
from dearmpi.plan.data.plan import Plan
from dearmpi.plan.model.cost import Costs, LinkModel
from dearmpi.span import Span, Track
from dearmpi.tune.plan_process import PlanProcess, PlanRequest
from tests.combinations import turns_of
from tests.mpi.semantics import (
    Side,
    adam,
    assert_same_on_both_sides,
    layers,
    train,
)
from tests.mpi.test_plan import plan_for, script_with

pytestmark = pytest.mark.ranks(2, 3)


class _Calibrated(NamedTuple):
    costs: Costs


def begin_planning(
    world: World, *, eager: bool = False
) -> tuple[nn.Sequential, Side, DistributedOptimizer]:
    """A model whose optimizer is on its way to a plan."""
    model = layers()
    side = Side(world, bucket_cap_mb=None, eager=eager, plan="auto")
    optimizer = side.wrap(adam(model), model)
    assert isinstance(optimizer, DistributedOptimizer)
    return model, side, optimizer


@turns_of(eager=(False, True), gather=("parameters", "gradients"))
def test_a_job_plans_for_itself_and_changes_no_number(
    eager: bool, gather: str, world: World
) -> None:
    seen: list[DistributedOptimizer] = []
    settings: dict[str, Any] = {
        "bucket_cap_mb": None,
        "eager": eager,
        "gather": gather,
        "plan": "auto",
    }
    assert_same_on_both_sides(script_with(seen.append, MOST_STEPS), world, **settings)
    (optimizer,) = seen
    plan = optimizer.plan
    assert plan is not None and plan.world_size == world.size
    assert set(world.all_gather_text(plan.to_json())) == {plan.to_json()}
    assert plan.prediction.compute_s > 0 and plan.prediction.communication_s > 0
    assert optimizer.waited_s >= 0 and optimizer.spans.recorder is None
    pause = optimizer.plan_pause
    assert pause is not None and not optimizer.is_planning
    assert pause.measuring_s > 0 and pause.laying_out_s > 0
    assert pause.total_s == pause.waiting_s + pause.laying_out_s


def test_buckets_that_no_plan_beats_stay(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stands still, and the plan tells what is in use."""

    class Process(PlanProcess):
        def result(self) -> Plan:
            assert self._request.standing is not None
            return self._request.standing

    monkeypatch.setattr(self_planning, "PlanProcess", Process)
    model, side, optimizer = begin_planning(world, eager=True)
    engine = optimizer._built.engine
    train(side, model, optimizer, MOST_STEPS)
    plan = optimizer.plan
    assert plan is not None and "the buckets in use" in plan.origin
    assert plan.buckets == tuple(bucket.names for bucket in optimizer.layout)
    assert plan.schedule == optimizer.schedule and plan.window == optimizer.config.window
    assert optimizer._built.engine is engine and not optimizer.is_planning
    side.close()


def test_training_waits_for_no_plan_that_is_late(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    class Process(PlanProcess):
        def is_done(self) -> bool:
            looks.append(len(looks))
            return len(looks) > 7

    monkeypatch.setattr(self_planning, "PlanProcess", Process)
    monkeypatch.setattr(self_planning, "_PLANNING_S", 1e-9)  # due at once
    model, side, optimizer = begin_planning(world)
    train(side, model, optimizer, 12)
    assert optimizer.is_planning
    train(side, model, optimizer, 1)
    assert not optimizer.is_planning and len(looks) == 8 * world.is_root
    side.close()


def test_training_goes_on_while_a_plan_is_made_and_micro_batches_are_no_iterations(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[PlanRequest] = []

    class Process(PlanProcess):
        def __init__(self, request: PlanRequest) -> None:
            seen.append(request)
            super().__init__(request)

    monkeypatch.setattr(self_planning, "PlanProcess", Process)
    model, side, optimizer = begin_planning(world)
    for number in range(MOST_STEPS):
        assert number > 5 or optimizer.is_planning
        with optimizer.no_sync():
            for step in range(2):
                side.loss(model, step).backward()
        train(side, model, optimizer, 1)
    assert [request.micro_batches for request in seen] == [3] * world.is_root
    assert optimizer.plan is not None
    if world.is_root:
        compute_s = seen[0].profile.feed_forward_s + seen[0].profile.backprop_s
        assert optimizer.plan.prediction.compute_s == pytest.approx(3 * compute_s)
    side.close()


def test_plans_are_made_for_a_wire_as_fast_as_the_slowest_rank_has_seen_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other than before the first step, when connections carry less than ever after."""
    link = LinkModel(1e-4, 1e-9)
    calibrated = Costs(world.size, link, link)
    monkeypatch.setattr(self_planning, "calibrate", lambda *_, **__: _Calibrated(calibrated))
    model, side, optimizer = begin_planning(world)
    train(side, model, optimizer, 3)
    optimizer.synchronize()
    planning = optimizer._controller.planning
    assert planning is not None
    measurement = planning.measurement
    nbytes = int(1 / link.wire_s(1))  # for a second
    takes_s = 0.5 if world.rank else 0.75
    for number in range(42):
        start_s = 1e6 + number * takes_s
        measurement.add(Span(Track.REDUCE_SCATTER, "RS", start_s, start_s + takes_s, 1, 0, nbytes))
    costs = measurement.measure().costs
    found = costs.reduce_scatter
    assert found.beta_s_per_byte == pytest.approx(0.75 * link.beta_s_per_byte, rel=0.01)
    assert found.alpha_s == link.alpha_s
    assert costs.all_gather == link
    side.close()


def test_layers_frozen_while_a_plan_is_made_cost_the_plan_and_not_the_training(
    world: World, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    class Process(PlanProcess):
        def result(self) -> Plan:
            return plan_for(world.size)

    monkeypatch.setattr(self_planning, "PlanProcess", Process)
    model, side, optimizer = begin_planning(world, eager=True)
    train(side, model, optimizer, 6)
    model[2].weight.requires_grad_(False)  # which the plan has in a bucket with others
    train(side, model, optimizer, MOST_STEPS)
    told = [str(one.message) for one in recwarn if "plan 'auto' is given up" in str(one.message)]
    assert len(told) == world.is_root and all("2.weight" in text for text in told)
    assert optimizer.plan is None and not optimizer.is_planning
    side.close()


def test_a_plan_that_cannot_be_made_does_not_end_training(
    world: World, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    class Process(PlanProcess):
        def result(self) -> Plan:
            raise ConfigError("the costs are of nothing")

    monkeypatch.setattr(self_planning, "PlanProcess", Process)
    model, side, optimizer = begin_planning(world, eager=True)
    train(side, model, optimizer, MOST_STEPS + 1)
    told = [str(one.message) for one in recwarn if "plan 'auto' is given up" in str(one.message)]
    assert len(told) == world.is_root and all("rank 0 cannot plan: the" in text for text in told)
    assert optimizer.plan is None and not optimizer.is_planning
    side.close()


def test_a_compiled_model_trains_on_without_a_plan(
    world: World, recwarn: pytest.WarningsRecorder
) -> None:
    """Its layers run without hooks, so nothing can time them."""
    model, side, optimizer = begin_planning(world)
    compiled: Any = torch.compile(model, backend="eager")
    for step in range(6):
        optimizer.zero_grad()
        side.loss(compiled, step).backward()
        optimizer.step()
    told = [str(one.message) for one in recwarn if "plan 'auto' is given up" in str(one.message)]
    assert len(told) == world.is_root and all("before it is compiled" in text for text in told)
    assert optimizer.plan is None and not optimizer.is_planning
    side.close()
    torch.compiler.reset()


def test_inside_join_a_job_does_not_plan(world: World) -> None:
    """Ranks take unequal numbers of steps there, and planning takes all of them."""
    model, side, optimizer = begin_planning(world)
    with optimizer.join():
        train(side, model, optimizer, MOST_STEPS + world.rank)
    train(side, model, optimizer, 1)
    assert optimizer.plan is None
    model.register_parameter("extra", nn.Parameter(torch.zeros(2)))
    optimizer.add_param_group({"params": [model.extra]})
    assert not optimizer.is_planning
    side.close()


def learn(model: nn.Module, optimizer: DistributedOptimizer, *, steps: int) -> list[float]:
    """Steps on two batches in turn; the losses."""
    losses = []
    for step in range(steps):
        data = torch.randn(8, 256, generator=torch.Generator().manual_seed(step % 2))
        loss = (model(data)[:, 0] - data[:, 0]).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.synchronize()
    return losses


def wide() -> nn.Sequential:
    """Layers whose buckets are large enough to be compressed."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, 1)
    )


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LinkModel]]:
    """What jobs take their link for: at first one so slow that bytes are all that counts."""
    measure, links = self_planning.JobMeasurement.measure, [LinkModel(1e-6, 1e-6)]

    def on_that_link(self: self_planning.JobMeasurement, **given: Any) -> Any:
        measured = measure(self, **given)
        costs = replace(measured.costs, reduce_scatter=links[0], all_gather=links[0])
        return measured._replace(costs=costs)

    monkeypatch.setattr(self_planning.JobMeasurement, "measure", on_that_link)
    yield links


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_job_chooses_what_travels_and_then_plans_for_it(
    is_slow: bool, world: World, link: list[LinkModel]
) -> None:
    """The plan counts what was taken; state and replicas outlive both new layouts."""
    if not is_slow:
        link[0] = LinkModel(1e-7, 1e-15)
    model = wide()
    inner = torch.optim.Adam(model.parameters(), lr=1e-3)
    settings: dict[str, Any] = {"compress": "auto", "plan": "auto", "check_every": 1}
    optimizer = DistributedOptimizer(inner, model, world=world, **settings)
    losses, seen = list[float](), list[tuple[bool, bool, bool]]()
    while optimizer.is_choosing or optimizer.is_planning:
        losses += learn(model, optimizer, steps=1)
        seen.append((optimizer.is_choosing, optimizer.is_planning, optimizer.plan is None))
        assert len(seen) < 10 + MOST_STEPS
    phases = list(dict.fromkeys(seen))
    assert phases == [(True, True, True), (False, True, True), (False, False, False)]
    losses += learn(model, optimizer, steps=12)
    plan, traffic = optimizer.plan, optimizer.traffic
    taken = "int4" if is_slow else "none"
    assert plan is not None and optimizer.config.compress == taken
    assert plan.buckets == tuple(bucket.names for bucket in optimizer.layout)
    assert (traffic.reduced + traffic.gathered < 0.3 * traffic.dense) == is_slow
    assert losses[-1] < 0.5 * losses[0]
    told = optimizer.codec_choice + plan.to_json()
    assert len(set(world.all_gather_text(told))) == 1
    state = optimizer.state_dict()
    assert all(int(entries["step"]) == len(losses) for entries in state["state"].values())
    optimizer.close()


@pytest.mark.usefixtures("link")
def test_a_job_chooses_what_travels(world: World) -> None:
    """Buckets that are compressed."""
    model = wide()
    inner = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = DistributedOptimizer(inner, model, world=world, compress="auto", check_every=1)
    losses = learn(model, optimizer, steps=16)
    traffic, line = optimizer.traffic, optimizer.codec_choice
    assert optimizer.config.compress == "int4" and "int4" in line
    assert traffic.reduced + traffic.gathered < 0.2 * traffic.dense
    assert losses[-1] < 0.5 * losses[0]
    assert len(set(world.all_gather_text(line))) == 1
    optimizer.close()
