"""Plans: followed from the start, taken up while training, or made by the job itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.engine import self_planning
from dearmpi.engine.self_planning import MOST_STEPS
from dearmpi.engine.span import Lane, Span
from dearmpi.errors import ConfigError
from dearmpi.plan.parameter import spec_of
from dearmpi.plan.plan import Plan, Prediction, fingerprint
from dearmpi.plan.schedule import AllGather, Launch, Schedule, Wait
from dearmpi.tune.plan_process import PlanProcess, PlanRequest
from tests.mpi.semantics import (
    Side,
    adam,
    assert_same_on_both_sides,
    layers,
    outcome,
    train,
)

pytestmark = pytest.mark.ranks(2, 3)

BUCKETS = (("0.weight", "0.bias"), ("2.weight", "2.bias", "4.weight"), ("4.bias",))
# Bucket 2 is gathered behind the reduce-scatter of bucket 1, so during backprop if eager.
EARLY = Schedule(
    "early",
    (2, 1, 0),
    (AllGather(2, 1), AllGather(0, 0), AllGather(1, 0)),
    Launch.GRADIENTS_READY,
    Wait.FEED_FORWARD,
)


def plan_for(world_size: int, **changes: Any) -> Plan:
    names = tuple(name for bucket in BUCKETS for name in bucket)
    values = {
        "parameters": names,
        "buckets": BUCKETS,
        "schedule": EARLY,
        "window": 1,
        "eager": True,
        "world_size": world_size,
        "fingerprint": fingerprint([spec_of(p, n) for n, p in layers().named_parameters()]),
        "prediction": Prediction(1.0, 0.5, 0.5, 0.75),
        "origin": "by hand",
    }
    return Plan(**{**values, **changes})


def script_with(change: Any) -> Any:
    """Train, have ``change`` done to the optimizer, and train on."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        train(side, model, optimizer, 3)
        if side.is_distributed:
            change(optimizer)
        train(side, model, optimizer, MOST_STEPS)
        return outcome(model, optimizer)

    return script


def test_a_plan_from_the_start(world: World, tmp_path: Path) -> None:
    path = tmp_path / f"plan-{world.rank}.json"
    path.write_text(plan_for(world.size).to_json())

    def check(optimizer: DistributedOptimizer) -> None:
        assert tuple(bucket.names for bucket in optimizer.layout) == BUCKETS
        assert optimizer.schedule == EARLY
        assert optimizer.plan == plan_for(world.size)

    settings: dict[str, Any] = {"bucket_cap_mb": None, "eager": True, "plan": path}
    assert_same_on_both_sides(script_with(check), world, **settings)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_a_plan_taken_up_while_training_changes_no_number(gather: str, world: World) -> None:
    def follow(optimizer: DistributedOptimizer) -> None:
        optimizer.follow(plan_for(world.size))
        assert len(optimizer.layout) == len(BUCKETS)

    settings: dict[str, Any] = {"bucket_cap_mb": None, "eager": True, "gather": gather}
    assert_same_on_both_sides(script_with(follow), world, **settings)


def test_a_plan_after_a_search_for_a_cap_is_not_held_to_that_cap(world: World) -> None:
    def search_and_follow(optimizer: DistributedOptimizer) -> None:
        optimizer.fuse(1.0)
        assert optimizer.config.bucket_cap_mb == 1.0
        optimizer.follow(plan_for(world.size))
        assert optimizer.config.bucket_cap_mb is None

    settings: dict[str, Any] = {"bucket_cap_mb": None, "eager": True}
    assert_same_on_both_sides(script_with(search_and_follow), world, **settings)


@pytest.mark.parametrize("before", ["auto", None])
def test_a_foreign_plan_is_refused_and_training_goes_on_as_before(
    before: str | None, world: World
) -> None:
    def refuse(optimizer: DistributedOptimizer) -> None:
        layout = optimizer.layout
        with pytest.raises(ConfigError, match="fingerprint|another model|world size"):
            optimizer.follow(plan_for(world.size, fingerprint="0" * 16))
        assert optimizer.layout == layout and optimizer.plan is None
        assert optimizer.is_planning == (before == "auto")

    settings: dict[str, Any] = {"bucket_cap_mb": None, "eager": True, "plan": before}
    assert_same_on_both_sides(script_with(refuse), world, **settings)


def test_gathers_are_posted_in_the_plan_s_order(world: World) -> None:
    model = layers()
    side = Side(world, bucket_cap_mb=None, eager=True, plan=plan_for(world.size), check_every=100)
    optimizer = side.wrap(adam(model), model)
    train(side, model, optimizer, 1)
    assert optimizer._assembly.engine.take_posted() == "RS2 RS1 RS0 | AG2 AG0 AG1"
    side.close()


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("eager", [False, True])
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
    assert_same_on_both_sides(script_with(seen.append), world, **settings)
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
    model = layers()
    side = Side(world, bucket_cap_mb=None, eager=True, plan="auto")
    optimizer = side.wrap(adam(model), model)
    engine = optimizer._assembly.engine
    train(side, model, optimizer, MOST_STEPS)
    plan = optimizer.plan
    assert plan is not None and "the buckets in use" in plan.origin
    assert plan.buckets == tuple(bucket.names for bucket in optimizer.layout)
    assert plan.schedule == optimizer.schedule and plan.window == optimizer.config.window
    assert optimizer._assembly.engine is engine and not optimizer.is_planning
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
    model = layers()
    side = Side(world, bucket_cap_mb=None, plan="auto")
    optimizer = side.wrap(adam(model), model)
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


def test_plans_are_made_for_a_wire_as_fast_as_the_slowest_rank_has_seen_it(world: World) -> None:
    """Other than before the first step, when connections carry less than ever after."""
    model = layers()
    side = Side(world, bucket_cap_mb=None, plan="auto")
    optimizer = side.wrap(adam(model), model)
    train(side, model, optimizer, 3)
    optimizer.synchronize()
    planning = optimizer._planning
    assert planning is not None
    calibrated = planning._costs
    nbytes = int(1 / calibrated.reduce_scatter.wire_s(1))  # for a second
    takes_s = 0.5 if world.rank else 0.75
    for number in range(42):
        start_s = 1e6 + number * takes_s
        planning.add(Span(Lane.REDUCE_SCATTER, "RS", start_s, start_s + takes_s, 1, 0, nbytes))
    _, costs = planning.measure()
    found, before = costs.reduce_scatter, calibrated.reduce_scatter
    assert found.beta_s_per_byte == pytest.approx(0.75 * before.beta_s_per_byte, rel=0.01)
    assert found.alpha_s == before.alpha_s
    assert costs.all_gather == calibrated.all_gather
    side.close()


def test_layers_frozen_while_a_plan_is_made_cost_the_plan_and_not_the_training(
    world: World, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    class Process(PlanProcess):
        def result(self) -> Plan:
            return plan_for(world.size)

    monkeypatch.setattr(self_planning, "PlanProcess", Process)
    model = layers()
    side = Side(world, bucket_cap_mb=None, eager=True, plan="auto")
    optimizer = side.wrap(adam(model), model)
    train(side, model, optimizer, 6)
    model[2].weight.requires_grad_(False)  # which the plan has in a bucket with others
    train(side, model, optimizer, MOST_STEPS)
    told = [str(one.message) for one in recwarn if "plan 'auto' is given up" in str(one.message)]
    assert len(told) == world.is_root and all("2.weight" in text for text in told)
    assert optimizer.plan is None and not optimizer.is_planning
    side.close()


def test_a_compiled_model_trains_on_without_a_plan(
    world: World, recwarn: pytest.WarningsRecorder
) -> None:
    """Its layers run without hooks, so nothing can time them."""
    model = layers()
    side = Side(world, bucket_cap_mb=None, plan="auto")
    optimizer = side.wrap(adam(model), model)
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
    model = layers()
    side = Side(world, bucket_cap_mb=None, plan="auto")
    optimizer = side.wrap(adam(model), model)
    with optimizer.join():
        train(side, model, optimizer, MOST_STEPS + world.rank)
    train(side, model, optimizer, 1)
    assert optimizer.plan is None
    side.close()


def test_what_does_not_fit_is_refused(world: World) -> None:
    model = layers()

    def wrap(**settings: Any) -> None:
        DistributedOptimizer(adam(model), model, world=world, **settings)

    with pytest.raises(ConfigError, match=f"for world size 7, but this job has {world.size}"):
        wrap(plan=plan_for(7), eager=True)
    with pytest.raises(ConfigError, match="another model"):
        wrap(plan=plan_for(world.size, fingerprint="0" * 16), eager=True)
    with pytest.raises(ConfigError, match="bucket_cap_mb is 2, but the plan decides"):
        wrap(plan="auto", bucket_cap_mb=2)
    with pytest.raises(ConfigError, match="made for eager=True"):
        wrap(plan=plan_for(world.size))
    with pytest.raises(ConfigError, match="cannot read the plan"):
        wrap(plan="no-such-plan.json")


def test_parameters_cannot_be_added_to_a_plan(world: World) -> None:
    model = layers()
    side = Side(world, bucket_cap_mb=None, eager=True, plan=plan_for(world.size))
    optimizer = side.wrap(adam(model), model)
    with pytest.raises(ConfigError, match="the plan is for 6 parameters"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    side.close()
