"""What is posted when: pictures of the network, the same on every rank."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import ProgressMode
from dearmpi.plan.data.layout import spec_of
from dearmpi.plan.data.plan import Plan, Prediction, fingerprint
from dearmpi.plan.data.schedule import AllGather, Launch, Schedule, Wait
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks
from tests.unit.engine.chain import (
    ALL_GATHERS,
    REDUCE_SCATTERS,
    Chain,
    distribute,
    name_of_bucket,
    operations,
)


def draw(
    size: int = 2, num_layers: int = 3, progress: ProgressMode = "poll", **settings: Any
) -> FakeHub:
    """The hub after one iteration, with marks where layers computed and where backprop ended."""
    hub = FakeHub(size, name=name_of_bucket(size, num_layers))

    def rank(world: World) -> None:
        model = Chain(num_layers, lambda label: hub.mark(world.rank, label))
        optimizer = distribute(model, world, window=num_layers, **settings)
        model.backward()
        if not settings.get("eager"):
            optimizer.clip_grad_norm_(1e9)  # waits for the reduction
        hub.mark(world.rank)
        optimizer.step()
        optimizer.close()

    run_ranks(size, rank, hub=hub, progress=progress)
    return hub


def test_dear_reduces_behind_backprop_and_gathers_after_the_step() -> None:
    hub = draw(schedule="dear")
    for rank in range(2):
        assert hub.picture(rank, REDUCE_SCATTERS, ALL_GATHERS) == (
            "F0 F1 F2 B2 RS2 B1 RS1 B0 RS0 | AG0 AG1 AG2"
        )


def test_wfbp_gathers_gradients_in_the_order_of_backprop() -> None:
    hub = draw(schedule="wfbp", gather="gradients")
    for rank in range(2):
        assert hub.picture(rank, REDUCE_SCATTERS) == "F0 F1 F2 B2 RS2 B1 RS1 B0 RS0 |"
        network = [part for part in hub.picture(rank, ALL_GATHERS).split() if part[0] not in "BF"]
        assert network == ["AG2", "AG1", "AG0", "|"]


def test_serial_reduces_nothing_before_backprop_has_ended() -> None:
    hub = draw(schedule="serial", gather="gradients")
    for rank in range(2):
        assert hub.picture(rank, REDUCE_SCATTERS) == "F0 F1 F2 B2 B1 B0 RS2 RS1 RS0 |"
        assert hub.picture(rank, ALL_GATHERS) == "F0 F1 F2 B2 B1 B0 AG2 AG1 AG0 |"


@pytest.mark.parametrize("schedule", ["dear", "wfbp", "serial"])
def test_what_is_posted_is_what_the_schedule_says(schedule: str) -> None:
    hub = draw(num_layers=5, schedule=schedule, progress="thread")
    for rank in range(2):
        gathers = [4, 3, 2, 1, 0] if schedule != "dear" else [0, 1, 2, 3, 4]
        assert operations(hub, rank, REDUCE_SCATTERS) == ["RS4", "RS3", "RS2", "RS1", "RS0"]
        assert operations(hub, rank, ALL_GATHERS) == [f"AG{bucket}" for bucket in gathers]


@pytest.mark.parametrize("schedule", ["dear", "wfbp", "serial"])
def test_eager_buckets_are_gathered_in_the_same_order(schedule: str) -> None:
    hub = draw(schedule=schedule, eager=True, progress="thread")
    gathers = ["AG2", "AG1", "AG0"] if schedule != "dear" else ["AG0", "AG1", "AG2"]
    for rank in range(2):
        assert operations(hub, rank, ALL_GATHERS) == gathers


@pytest.mark.parametrize("schedule", ["dear", "wfbp", "serial"])
def test_ranks_of_different_speed_post_in_the_same_order(schedule: str) -> None:
    """The hub refuses operations that do not match; and the slow rank's order is the plan's."""
    hub = FakeHub(3, name=name_of_bucket(3, 4))

    def rank(world: World) -> None:
        model = Chain(4, lambda _: time.sleep(0.003 * world.rank))
        optimizer = distribute(model, world, schedule=schedule, gather="gradients")
        for _ in range(3):
            model.backward()
            optimizer.step()
        optimizer.close()

    run_ranks(3, rank, hub=hub)
    for rank_ in range(1, 3):
        for communicator in (REDUCE_SCATTERS, ALL_GATHERS):
            assert operations(hub, rank_, communicator) == operations(hub, 0, communicator)


def test_gradients_that_arrive_in_another_order_on_one_rank_are_posted_in_the_plan_s() -> None:
    hub = FakeHub(2, name=name_of_bucket(2, 3))

    def rank(world: World) -> list[int]:
        model = Chain(3)
        optimizer = distribute(model, world, schedule="dear")
        arrived: list[int] = []
        for number, layer in enumerate(model.layers):
            layer.weight.register_post_accumulate_grad_hook(  # type: ignore[operator]
                lambda _, number=number: arrived.append(number)
            )
        order = [0, 1, 2] if world.rank else [2, 1, 0]
        for number in order:  # each layer by itself, in an order of this rank's own
            layer = model.layers[number]
            layer(torch.ones(1, 4 * (number + 1))).sum().backward()
        optimizer.step()
        optimizer.close()
        return arrived

    assert run_ranks(2, rank, hub=hub) == [[2, 1, 0], [0, 1, 2]]
    for rank_ in range(2):
        assert operations(hub, rank_, REDUCE_SCATTERS) == ["RS2", "RS1", "RS0"]


def test_a_nested_no_sync_that_ends_leaves_gradients_local() -> None:
    hub = FakeHub(2, name=name_of_bucket(2, 3))

    def rank(world: World) -> None:
        model = Chain(3)
        optimizer = distribute(model, world)
        with optimizer.no_sync():
            with optimizer.no_sync():
                model.backward()
            model.backward()
        hub.mark(world.rank, "last")
        model.backward()
        optimizer.step()
        optimizer.close()

    run_ranks(2, rank, hub=hub, progress="poll")
    for rank_ in range(2):
        assert hub.picture(rank_, REDUCE_SCATTERS) == "last RS2 RS1 RS0"


def test_gradients_travel_during_backprop_again_after_an_exception_inside_no_sync() -> None:
    """As after a batch for which the memory did not do, which a script leaves out."""
    hub = FakeHub(2, name=name_of_bucket(2, 3))

    def rank(world: World) -> None:
        model = Chain(3)
        optimizer = distribute(model, world, window=3)
        with pytest.raises(MemoryError), optimizer.no_sync():
            raise MemoryError
        model.backward()
        hub.mark(world.rank, "step")
        optimizer.step()
        optimizer.close()

    run_ranks(2, rank, hub=hub, progress="poll")
    for rank_ in range(2):
        assert hub.picture(rank_, REDUCE_SCATTERS) == "RS2 RS1 RS0 step"


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("progress", ["thread", "poll"])
def test_no_more_than_the_window_is_in_flight(window: int, progress: ProgressMode) -> None:
    hub = FakeHub(2, name=name_of_bucket(2, 6), seconds=lambda label, nbytes: 0.02)

    def rank(world: World) -> None:
        model = Chain(6)
        optimizer = distribute(model, world, window=window)
        for _ in range(3):
            model.backward()
            optimizer.step()
        optimizer.close()

    run_ranks(2, rank, hub=hub, progress=progress)
    for rank_ in range(2):
        for communicator in (REDUCE_SCATTERS, ALL_GATHERS):
            assert hub.most_in_flight[rank_, communicator] == window


def test_a_bucket_is_updated_and_gathered_during_backprop_if_the_caller_promises_a_step() -> None:
    """eager=True with wfbp: the last layers' bucket comes back before backprop is over."""
    hub = FakeHub(2, name=name_of_bucket(2, 3))
    gathered = threading.Event()

    def moment(label: str) -> None:
        if label == "B0" and not gathered.wait(60):
            raise AssertionError("AG2 was not posted before backprop came to the first layer")

    def watch() -> None:
        while not gathered.is_set():
            if {"AG2"} <= {record.label for record in list(hub.records)}:
                gathered.set()
            time.sleep(0.001)

    def rank(world: World) -> None:
        model = Chain(3, moment)
        optimizer = distribute(model, world, schedule="wfbp", eager=True)
        model.backward()
        optimizer.step()
        optimizer.close()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        run_ranks(2, rank, hub=hub)
    finally:
        gathered.set()
        watcher.join()


def test_a_gather_waits_for_the_reduce_scatter_that_the_plan_ties_it_to() -> None:
    """Though its own bucket is updated long before: it would share the wire with the others'."""
    hub = FakeHub(2, name=name_of_bucket(2, 3))
    tied = Schedule(
        "tied",
        (2, 1, 0),
        (AllGather(2, 0), AllGather(0, 0), AllGather(1, 0)),
        Launch.GRADIENTS_READY,
        Wait.FEED_FORWARD,
    )

    def rank(world: World) -> None:
        model = Chain(3)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = plan_of_layers(model, tied)
        optimizer = DistributedOptimizer(inner, model, world=world, eager=True, plan=plan)
        model.backward()
        optimizer.step()
        optimizer.close()

    run_ranks(2, rank, hub=hub, progress="poll")
    for rank_ in range(2):
        posted = hub.picture(rank_, REDUCE_SCATTERS, ALL_GATHERS)
        assert posted == "RS2 RS1 RS0 AG2 AG0 AG1"


def plan_of_layers(model: Chain, schedule: Schedule) -> Plan:
    """For two ranks, one bucket per layer."""
    named = list(model.named_parameters())
    return Plan(
        parameters=tuple(name for name, _ in named),
        buckets=tuple((name,) for name, _ in named),
        schedule=schedule,
        window=2,
        eager=True,
        world_size=2,
        fingerprint=fingerprint([spec_of(param, name) for name, param in named]),
        prediction=Prediction(1.0, 0.5, 0.5, 0.75),
        origin="by hand",
    )
