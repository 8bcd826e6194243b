"""Communication hidden behind computation: proven on a clock that the test moves, then measured."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import pytest
import torch

from dearmpi.comm.world import World
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks
from tests.unit.engine.chain import Chain, distribute, name_of_bucket
from tests.unit.engine.stage import Stage


def test_step_returns_and_each_layer_waits_for_its_own_bucket_only() -> None:
    """No time passes during backprop and step; then a layer computes when it is gathered.

    Its successors' parameters cannot be there yet: the clock stands still.
    """
    stage = Stage(num_layers=4)

    def rank(world: World) -> None:
        first = True

        def moment(label: str) -> None:
            if not first:
                stage.note(world.rank, label)

        model = Chain(4, moment)
        optimizer = distribute(model, world)
        model.backward()
        stage.note(world.rank, "backprop")
        optimizer.step()
        stage.note(world.rank, "step")
        first = False
        model(torch.ones(2, 4))
        optimizer.close()

    with stage.running(rank):
        stage.await_moment("step")
        assert stage.clock.now() == 0.0
        for bucket in (3, 2, 1, 0):
            stage.finish(f"RS{bucket}")
        for bucket in range(4):
            assert not stage.has_happened(f"F{bucket}")
            stage.finish(f"AG{bucket}")
            stage.await_moment(f"F{bucket}")
    for rank_ in range(2):
        computed_s = [stage.log[rank_, f"F{layer}"] for layer in range(4)]
        assert computed_s == [5.0, 6.0, 7.0, 8.0]  # four reduce-scatters and then one gather each


@pytest.mark.parametrize("schedule", ["wfbp", "serial"])
def test_the_baselines_step_waits_for_everything(schedule: str) -> None:
    stage = Stage(num_layers=2)

    def rank(world: World) -> None:
        model = Chain(2)
        optimizer = distribute(model, world, schedule=schedule)
        model.backward()
        stage.note(world.rank, "backprop")
        optimizer.step()
        stage.note(world.rank, "step")
        optimizer.close()

    with stage.running(rank):
        stage.await_moment("backprop")
        for label in ("RS1", "RS0", "AG1", "AG0"):
            assert not stage.has_happened("step")
            stage.finish(label)
        stage.await_moment("step")
    assert [stage.log[rank_, "step"] for rank_ in range(2)] == [4.0, 4.0]


NUM_LAYERS = 4
# Of a layer. A busy machine holds up what is longer by a smaller share of it.
PACES_S = (0.02, 0.06, 0.2)


def compute_s(layer_s: float) -> float:
    return 2 * NUM_LAYERS * layer_s


def iteration_times(layer_s: float, operation_s: float, **settings: Any) -> list[float]:
    """Seconds of each of some iterations of layers that sleep; the slower rank's."""
    hub = FakeHub(
        2,
        name=name_of_bucket(2, NUM_LAYERS),
        seconds=lambda label, nbytes: operation_s if label != "AR" else 0.0,
    )

    def rank(world: World) -> list[float]:
        model = Chain(NUM_LAYERS, lambda _: time.sleep(layer_s))
        optimizer = distribute(model, world, **settings)
        times = []
        for _ in range(12):
            world.barrier()
            start = time.perf_counter()
            model.backward()
            optimizer.step()
            times.append(time.perf_counter() - start)
        optimizer.close()
        return times[2:]

    return [max(pair) for pair in zip(*run_ranks(2, rank, hub=hub), strict=True)]


def test_dear_hides_what_serial_exposes() -> None:
    """Equal computation, equal communication: all that differs is what is exposed."""

    def is_hidden(layer_s: float) -> bool:
        operation_s = 0.6 * layer_s
        exposed_s = {
            schedule: min(iteration_times(layer_s, operation_s, schedule=schedule))
            - compute_s(layer_s)
            for schedule in ("dear", "wfbp", "serial")
        }
        assert exposed_s["serial"] > 7 * operation_s
        # Expected of dear: the first layers' reduce-scatter and all-gather, of 8 operations 2.
        return exposed_s["dear"] < min(0.6 * exposed_s["serial"], exposed_s["wfbp"])

    assert any(map(is_hidden, PACES_S))


def test_communication_longer_than_computation_costs_the_excess() -> None:

    def is_the_excess(layer_s: float) -> bool:
        operation_s = 1.5 * layer_s
        times = iteration_times(layer_s, operation_s, schedule="dear")
        network_s = 2 * NUM_LAYERS * operation_s
        # A rank that is held up between two iterations has less to wait for in the second.
        needs_it = median(times) > 0.95 * network_s
        return needs_it and min(times) < 0.9 * (network_s + compute_s(layer_s))

    assert any(map(is_the_excess, PACES_S))


def test_times_tell_exposed_from_hidden_communication() -> None:
    def shares(layer_s: float, schedule: str) -> list[list[float]]:
        hub = FakeHub(
            2,
            name=name_of_bucket(2, NUM_LAYERS),
            seconds=lambda label, nbytes: 0.4 * layer_s if label != "AR" else 0.0,
        )

        def rank(world: World) -> list[float]:
            model = Chain(NUM_LAYERS, lambda _: time.sleep(layer_s))
            optimizer = distribute(model, world, schedule=schedule)
            hidden = []
            for iteration in range(9):
                model.backward()
                optimizer.step()
                # Of the first, nothing need have ended by now; the second has waited for all of it.
                assert iteration == 0 or optimizer.times.communication_s > 0
                hidden.append(optimizer.times.hidden_share)
            optimizer.close()
            return hidden[1:]

        return run_ranks(2, rank, hub=hub)

    def differ(layer_s: float) -> bool:
        dear, serial = shares(layer_s, "dear"), shares(layer_s, "serial")
        # A rank that is held up in its backprop hides nothing of the other's communication.
        return min(map(max, dear)) > max(map(median, serial)) + 0.3

    assert any(map(differ, PACES_S))
