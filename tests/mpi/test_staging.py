"""Training on a device that is as late as it may be equals training in one process.

The device is a stand-in on host tensors: the streams and events are the ones of a real device, and
whoever does not wait for them sees old values.
"""

from __future__ import annotations

import pytest

from dearmpi.comm.world import World
from tests.lazy_device import LazyDevice, put_on
from tests.mpi.oracle import Case, assert_same, train

CASES = [
    Case(optimizer="adamw", groups=3),
    Case(model="branches", optimizer="adam", eager=True, window=1),
    Case(model="text", optimizer="nesterov", gather="gradients", reduce_scatter="exchange"),
    Case(model="image", optimizer="adam", micro_batches=3, clip=2.0, scheduler="lambda"),
    Case(model="matrices", optimizer="muon", gather="gradients", clip=2.0),
    Case(optimizer="sgd", schedule="wfbp", reduce_scatter="native", cap_mb=1.0),
    Case(model="mixed", optimizer="nesterov", schedule="serial", reduce_scatter="auto"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model}-{case.optimizer}")
def test_training_equals_one_process(
    case: Case, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(case)
    device = LazyDevice()
    put_on(monkeypatch, device)
    found = train(case, world)
    assert_same(found, expected)
    assert (device.num_copies > 0) == (world.size > 1)
