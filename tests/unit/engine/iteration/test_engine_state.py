"""Buckets that backprop does not fill, on one rank or all, go last and hold up no others."""

from __future__ import annotations

import pytest

from dearmpi.comm.world import World
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks
from tests.unit.engine.chain import (
    REDUCE_SCATTERS,
    Chain,
    distribute,
    name_of_bucket,
    operations,
)


@pytest.mark.parametrize("schedule", ["dear", "wfbp"])
@pytest.mark.parametrize("forgetful", [0, 1])
@pytest.mark.parametrize("without", [{0, 1, 2, 3}, {0, 3}])
def test_a_bucket_that_backprop_does_not_fill_holds_up_no_others_from_the_third_step_on(
    schedule: str, forgetful: int, without: set[int]
) -> None:
    """The last layer has no gradient on one rank in steps of which the first two know nothing yet;
    nine steps after the last of them it is forgotten.
    """
    hub = FakeHub(2, name=name_of_bucket(2, 4))

    def rank(world: World) -> None:
        model = Chain(4)
        optimizer = distribute(model, world, schedule=schedule, eager=True, window=4)
        for step in range(14):
            hub.mark(world.rank, "step")
            skips = world.rank == forgetful and step in without
            model.backward(num_layers=3 if skips else None)
            world.progress.poll()
            hub.mark(world.rank)
            optimizer.step()
            optimizer.synchronize()
        optimizer.close()

    run_ranks(2, rank, hub=hub, progress="poll")
    steps = hub.picture(forgetful, REDUCE_SCATTERS).split("step ")[1:]
    for step in without:
        expected = "| RS3 RS2 RS1 RS0" if step < 2 else "RS2 RS1 RS0 | RS3"
        assert steps[step].strip() == expected
    in_order, late = ["RS3", "RS2", "RS1", "RS0"], ["RS2", "RS1", "RS0", "RS3"]
    for rank_ in range(2):
        assert operations(hub, rank_, REDUCE_SCATTERS) == 2 * in_order + 11 * late + in_order


def test_a_bucket_that_is_not_filled_stays_last_beside_a_rank_that_has_joined() -> None:
    hub = FakeHub(2, name=name_of_bucket(2, 4))

    def rank(world: World) -> None:
        model = Chain(4)
        optimizer = distribute(model, world, schedule="dear", eager=True)
        with optimizer.join():
            for _ in range(2 if world.rank else 14):
                model.backward(num_layers=3)
                optimizer.step()
        optimizer.close()

    run_ranks(2, rank, hub=hub)
    for rank_ in range(2):
        order = " ".join(operations(hub, rank_, REDUCE_SCATTERS))
        assert order == " ".join(2 * ["RS3 RS2 RS1 RS0"] + 12 * ["RS2 RS1 RS0 RS3"])
