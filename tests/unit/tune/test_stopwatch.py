"""Stopwatches: what waits for communication does not count, and a device keeps its own time."""

from __future__ import annotations

import torch

from dearmpi.comm.world import World
from dearmpi.engine.optimizer import DistributedOptimizer
from dearmpi.tune.layer_passes import DeviceStopwatch, HostStopwatch, Stopwatch
from dearmpi.tune.layer_timer import LayerTimer
from tests.fakes import FakeClock, FakeHub
from tests.fakes.ranks import run_ranks
from tests.unit.engine.chain import Chain
from tests.unit.tune.timed import chain, shown, timer, train


def profile_while_distributed(world: World) -> tuple[float, float]:
    """Compute time of an iteration, and how long it waited."""
    model = Chain(4)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, world=world, bucket_cap_mb=1e-4
    )
    watch = LayerTimer(model, waited=lambda: optimizer.waited_s)
    for _ in range(4):
        optimizer.zero_grad()
        model.backward()
        optimizer.step()
    profile = watch.finish()
    waited_s = optimizer.waited_s / 4
    optimizer.close()
    assert [layer.name for layer in profile.workload.layers] == [f"layers.{n}" for n in range(4)]
    return profile.feed_forward_s + profile.backprop_s, waited_s


def test_waits_for_communication_are_no_computation() -> None:
    def is_told_apart(wait_s: float) -> bool:
        hub = FakeHub(2, seconds=lambda label, nbytes: wait_s)
        pairs = run_ranks(2, profile_while_distributed, hub=hub)
        return all(
            waited_s > 4 * wait_s and compute_s < waited_s / 2 for compute_s, waited_s in pairs
        )

    # A busy machine may hold a rank up while the wire works, so that it has less to wait for: the
    # less so, the longer it works.
    assert any(map(is_told_apart, (0.02, 0.1, 0.5)))


def test_a_clock_that_stands_still_while_waiting() -> None:
    waited_s = 0.0
    stopwatch: Stopwatch = HostStopwatch(lambda: waited_s)
    start = stopwatch.mark()
    waited_s = 1000.0
    assert -1000.0 <= stopwatch.seconds(start, stopwatch.mark()) < -900.0


class FakeEvent:
    """An event of a device that is ``late`` milliseconds behind the host."""

    def __init__(self, clock: FakeClock, settled: list[FakeEvent]) -> None:
        self._settled = settled
        self.at_s = clock.now()

    def synchronize(self) -> None:
        self._settled.append(self)

    def elapsed_time(self, end_event: FakeEvent, /) -> float:
        assert self._settled, "read before the device has come that far"
        return (end_event.at_s - self.at_s) * 1e3


def test_events_of_a_device_serve_as_marks() -> None:
    clock, settled = FakeClock(), list[FakeEvent]()
    model = chain(clock)
    stopwatch = DeviceStopwatch(lambda: FakeEvent(clock, settled))
    watch = timer(model, clock, stopwatch=stopwatch)
    train(model, 2)
    assert not settled  # nobody waits while training
    assert shown(watch.finish()) == [("0", 1, 10), ("1", 2, 20), ("2", 3, 30)]
