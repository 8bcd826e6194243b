"""Plans: followed from the start, taken up while training, or made by the job itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.engine.iteration.engine import Engine
from dearmpi.engine.setup.self_planning import MOST_STEPS
from dearmpi.errors import ConfigError, MismatchError
from dearmpi.plan.data.layout import spec_of
from dearmpi.plan.data.plan import Plan, Prediction, fingerprint
from dearmpi.plan.data.schedule import AllGather, Launch, Schedule, Wait
from tests.codes import raises
from tests.mpi.semantics import (
    NUM_STEPS,
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


def script_with(change: Any, num_steps: int = 2 * NUM_STEPS) -> Any:
    """Train, have ``change`` done to the optimizer, and train ``num_steps`` on."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        train(side, model, optimizer, 3)
        if side.is_distributed:
            change(optimizer)
        train(side, model, optimizer, num_steps)
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
    num_steps = MOST_STEPS if before else 2 * NUM_STEPS  # a plan comes until then
    assert_same_on_both_sides(script_with(refuse, num_steps), world, **settings)


def test_gathers_are_posted_in_the_plan_s_order(world: World) -> None:
    model = layers()
    side = Side(world, bucket_cap_mb=None, eager=True, plan=plan_for(world.size), check_every=100)
    optimizer = side.wrap(adam(model), model)
    train(side, model, optimizer, 1)
    optimizer.synchronize()
    engine = optimizer._built.engine
    assert isinstance(engine, Engine)
    replicas = engine.state.replicas
    assert replicas is not None
    assert (replicas.reduces, replicas.gathers) == ([2, 1, 0], [2, 0, 1])
    side.close()


def test_what_does_not_fit_is_refused(world: World) -> None:
    model = layers()

    def wrap(**settings: Any) -> None:
        DistributedOptimizer(adam(model), model, world=world, **settings)

    with pytest.raises(ConfigError, match=f"for world size 7, but this job has {world.size}"):
        wrap(plan=plan_for(7), eager=True)
    with pytest.raises(ConfigError, match="another model"):
        wrap(plan=plan_for(world.size, fingerprint="0" * 16), eager=True)
    with raises(ConfigError, "plan-contradicts-settings", "bucket_cap_mb", "2"):
        wrap(plan="auto", bucket_cap_mb=2)
    with raises(ConfigError, "plan-contradicts-settings", "eager=True"):
        wrap(plan=plan_for(world.size))
    with raises(ConfigError, "plan-contradicts-settings", "gather='gradients'", "'parameters'"):
        wrap(plan=plan_for(world.size, gather="gradients"), eager=True)
    with raises(ConfigError, "file-missing"):
        wrap(plan="no-such-plan.json")
    other = plan_for(world.size, window=2) if world.rank == 1 else plan_for(world.size)
    for plan in ("auto" if world.rank == 1 else None, other):
        with raises(MismatchError, "ranks-differ-in-plan", "rank 1", "rank 0"):
            wrap(plan=plan, eager=True)
    optimizer = DistributedOptimizer(adam(model), model, world=world, eager=True)
    with raises(MismatchError, "ranks-differ-in-plan", "rank 1", "3"):
        optimizer.follow(other)
    optimizer.close()


def test_parameters_cannot_be_added_to_a_plan(world: World) -> None:
    model = layers()
    side = Side(world, bucket_cap_mb=None, eager=True, plan=plan_for(world.size))
    optimizer = side.wrap(adam(model), model)
    with raises(ConfigError, "plan-of-other-model", "6"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    side.close()
