"""What a caller says is done or refused, on one rank as on several."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from dearmpi import DistributedOptimizer, EngineConfig
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError, MismatchError
from tests.codes import raises
from tests.mpi.oracle import copies, fingerprint
from tests.mpi.semantics import Side, adam, layers, train, whole_batch

pytestmark = pytest.mark.ranks(1, 2, 3)

OTHER_VALUES: dict[str, Any] = {
    "schedule": "wfbp",
    "gather": "gradients",
    "bucket_cap_mb": 0.002,
    "reduce_scatter": "native",
    "topology": "hosts",
    "comm_dtype": "bf16",
    "compress": "int8",
    "window": 1,
    "eager": True,
    "master_weights": True,
    "check_every": 3,
    "buffers": "average",
    "shards": "even",
}
OF_COMPRESS = (  # of no effect alone
    "density",
    "error_feedback",
    "scope",
    "coordinates",
    "compress_after",
    "powersgd_rank",
)


def test_no_argument_is_dropped(world: World) -> None:
    """Each setting arrives, by name or in a configuration; its effect has tests of its own."""
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert names == {*OTHER_VALUES, "cuda_buffers", "update_on", *OF_COMPRESS}
    for name, value in OTHER_VALUES.items():
        for settings in ({name: value}, {"config": EngineConfig(**{name: value})}):
            # Masters make sense behind half precision, half precision on the wire behind the rest;
            # MPI adds no halves.
            whole = name in ("comm_dtype", "reduce_scatter")
            model = layers() if whole else layers().bfloat16()
            optimizer = DistributedOptimizer(adam(model), model, world=world, **settings)
            assert optimizer.config == EngineConfig(**{name: value})
            optimizer.close()


@pytest.mark.parametrize(
    "settings", [{"cuda_buffers": "staged"}, {"cuda_buffers": "direct"}, {"update_on": "host"}]
)
def test_a_way_for_a_device_is_refused_where_there_is_none(
    settings: dict[str, Any], world: World
) -> None:
    model = layers()
    ((name, value),) = settings.items()
    with raises(ConfigError, "setting-without-effect", name, value):
        DistributedOptimizer(adam(model), model, world=world, **settings)


def test_an_unknown_argument_is_refused(world: World) -> None:
    model = layers()
    unknown: dict[str, Any] = {"colour": True}
    with raises(ConfigError, "unknown-argument", "colour", "schedule"):
        DistributedOptimizer(adam(model), model, world=world, **unknown)
    with raises(ConfigError, "unknown-argument", "shedule", "(did you mean schedule?)"):
        DistributedOptimizer(adam(model), model, world=world, shedule="dear")  # type: ignore[call-arg]
    with raises(ConfigError, "unknown-argument", "fp16", 'comm_dtype="bf16"'):
        DistributedOptimizer(adam(model), model, world=world, fp16=True)  # type: ignore[call-arg]


def test_an_optimizer_of_another_model_is_refused(world: World) -> None:
    with raises(ConfigError, "parameters-not-in-model", "6"):
        DistributedOptimizer(adam(layers()), layers(), world=world)


@pytest.mark.ranks(2, 3)
def test_ranks_that_differ_are_refused(world: World) -> None:
    model = layers()
    optimizer = adam(model) if world.is_root else torch.optim.SGD(model.parameters(), lr=0.1)
    with raises(MismatchError, "ranks-built-differently", "rank 1", "rank 0"):
        DistributedOptimizer(optimizer, model, world=world)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_every_step_updates_whatever_the_world_size(gather: str, world: World) -> None:
    """On one rank too, and before anything else is called."""
    model = layers()
    side = Side(world, gather=gather)
    optimizer = side.wrap(adam(model), model)
    seen = {fingerprint(copies(model))}
    for step in range(3):
        train(side, model, optimizer, 1)
        seen.add(fingerprint({"outputs": model(whole_batch(step)), **copies(model)}))
    assert len(seen) == 4
    side.close()
