"""A long update leaves the wire to the other buckets, and the first gathers wait for no others."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.engine.iteration import stages
from tests.unit.engine.chain import Chain
from tests.unit.engine.stage import PATIENCE_S, Stage, wait_for

_SHARDS = {16 * (bucket + 1) * (bucket + 2) // 2: bucket for bucket in range(3)}  # by elements


class Held(torch.optim.SGD):
    """Once ``live``, it notes which bucket of a ``Chain`` it updates, and holds the first update
    until it is ``released``.
    """

    def __init__(self, params: Any, updated: list[int]) -> None:
        super().__init__(params, lr=0.1)
        self.updated = updated
        self.live, self.released = threading.Event(), threading.Event()

    def step(self, closure: Any = None) -> Any:
        if self.live.is_set():
            self.updated.append(_SHARDS[self.param_groups[0]["params"][0].numel()])
            if self.updated == [2]:
                assert self.released.wait(PATIENCE_S), "nothing went on beside the update"
        return super().step(closure)


@pytest.fixture(autouse=True)
def _all_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "LONG_S", 0.0)


def test_others_are_reduced_meanwhile_and_updated_in_the_order_of_gathers() -> None:
    stage, reduced = Stage(num_layers=3), threading.Event()
    updated: list[list[int]] = [[], []]

    def rank(world: World) -> None:
        model = Chain(3)
        model = Chain(3)
        inner = Held(model.parameters(), updated[world.rank])
        optimizer = DistributedOptimizer(inner, model, world=world, bucket_cap_mb=1e-6)
        inner.live.set()
        model.backward()
        optimizer.step()
        stage.note(world.rank, "step")
        assert reduced.wait(PATIENCE_S)
        for _ in range(2):  # with the second, what was complete before the first has been seen
            world.barrier()
        inner.released.set()
        optimizer.synchronize()
        optimizer.close()

    with stage.running(rank):
        stage.await_moment("step")
        stage.finish("RS2")
        wait_for(lambda: updated == [[2], [2]], "the update of bucket 2")
        for operation in ("RS1", "RS0"):
            stage.finish(operation)
        reduced.set()
        for bucket in range(3):
            stage.finish(f"AG{bucket}")
    assert updated == [[2, 0, 1], [2, 0, 1]]
