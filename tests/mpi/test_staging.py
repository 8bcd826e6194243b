"""Training on a device that is as late as it may be equals training in one process.

The device is a stand-in on host tensors: the streams and events are the ones of a real device, and
whoever does not wait for them sees old values.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dearmpi.comm.world import World
from dearmpi.tune.device_probe import OPERATIONS, ProbeVerdict
from tests.lazy_device import LazyDevice, put_on
from tests.mpi.oracle import REDUCE_SCATTERS, Case, assert_same, compares, train

CASES = [
    Case(optimizer="adamw", groups=3),
    Case(model="branches", optimizer="adam", eager=True, window=1),
    Case(model="text", optimizer="nesterov", gather="gradients", reduce_scatter="exchange"),
    Case(model="image", optimizer="adam", micro_batches=3, clip=2.0, scheduler="lambda"),
    Case(model="matrices", optimizer="muon", gather="gradients", schedule="wfbp", clip=2.0),
    Case(optimizer="sgd", schedule="wfbp", reduce_scatter="native", cap_mb=1.0),
    Case(model="mixed", optimizer="nesterov", schedule="serial", reduce_scatter="auto"),
]


HOST = [
    Case(optimizer="adamw", groups=3),
    Case(model="branches", optimizer="adam", eager=True, window=1),
    Case(model="image", optimizer="adam", micro_batches=3, clip=2.0, scheduler="lambda"),
    Case(model="mixed", optimizer="nesterov", schedule="serial", reduce_scatter="exchange"),
]


DIRECT = [
    Case(optimizer="adamw", reduce_scatter=algorithm, gather=gather)
    for algorithm in REDUCE_SCATTERS
    for gather in ("parameters", "gradients")
]


def train_on_lazy_device(
    case: Case,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    verdicts: tuple[ProbeVerdict, ...] = (),
) -> int:
    """Compare; returns the number of copies."""
    expected = train(case) if compares(case, world) else None
    device = LazyDevice()
    put_on(monkeypatch, device)
    monkeypatch.setattr("dearmpi.device.route_choice.known_verdicts", lambda: verdicts)
    found = train(case, world)
    if expected is not None:
        assert_same(found, expected)
    return device.num_copies


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model}-{case.optimizer}")
def test_training_equals_one_process(
    case: Case, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_copies = train_on_lazy_device(case, world, monkeypatch)
    assert (num_copies > 0) == (world.size > 1)


@pytest.mark.parametrize("case", HOST, ids=lambda case: f"{case.model}-{case.optimizer}")
def test_training_with_updates_on_the_host_equals_one_process(
    case: Case, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_on_lazy_device(replace(case, update_on="host"), world, monkeypatch) > 0


@pytest.mark.parametrize("case", DIRECT, ids=lambda case: f"{case.reduce_scatter}-{case.gather}")
def test_an_mpi_that_takes_device_memory_needs_no_copies(
    case: Case, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = tuple(ProbeVerdict(operation, works=True) for operation in OPERATIONS)
    assert train_on_lazy_device(case, world, monkeypatch, works) == 0
