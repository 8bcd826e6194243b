"""TransferQueue: how a device and the network take their turns, and how eagerly both are polled."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from dearmpi import DistributedOptimizer
from dearmpi.comm.progress.lane import Lane, Work
from dearmpi.comm.world import World
from dearmpi.engine.trace.spans import CommunicationClock, LaneTimer, Spans
from dearmpi.plan.data.layout import ParamSpec, build_layout
from dearmpi.span import Track
from dearmpi.tune.device_probe import OPERATIONS, ProbeVerdict
from tests.fakes import FakeClock, FakeHub
from tests.fakes.ranks import run_ranks
from tests.fakes.request import FakeRequest
from tests.lazy_device import HostStream, LazyDevice, put_on
from tests.unit.engine.chain import Chain, name_of_bucket
from tests.unit.engine.device_rank import SIZE, WINDOW, Rank
from tests.unit.engine.heard import Heard

BUCKET = build_layout([[ParamSpec("weight", (4,))]], SIZE).buckets[0]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("watched", [False, True])
def test_polling_is_eager_again_once_the_device_has_come_so_far(
    watched: bool, direct: bool
) -> None:
    """By then the host sleeps long, as it has waited for the device; the network may be quick."""
    rank, late, spans = Rank(FakeHub(SIZE), 0, direct=direct), HostStream(), Spans()
    spans.recorder = Heard() if watched else None
    buffer = torch.ones(4)
    late.is_open = False
    rank.comm_stream.written(buffer, [late])
    lane = Lane("all-gather", window=1)
    lane.observer = LaneTimer(Track.ALL_GATHER, CommunicationClock(spans), spans)
    gather = partial(rank.collectives.start_all_gather, buffer)
    lane.queue.append(Work("AG0", gather, lambda: None, subject=BUCKET))
    assert lane.advance()
    assert not any(lane.advance() for _ in range(20))
    late.is_open = True
    assert any(lane.advance() for _ in range(3))  # posted, but the other rank has not come yet
    assert not any(lane.advance() for _ in range(20)) and lane.in_flight


@pytest.mark.parametrize("direct", [False, True])
def test_a_poll_asks_the_network_once_for_each_operation_on_it(
    direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many wait behind it: each look takes the interpreter from computation."""
    rank, lane = Rank(FakeHub(SIZE), 0, direct=direct), Lane("all-gather", window=WINDOW + 2)
    for number in range(WINDOW + 2):
        gather = partial(rank.collectives.start_all_gather, torch.ones(4))
        lane.queue.append(Work(f"AG{number}", gather, lambda: None))
    while lane.advance():  # until nothing moves, as the other rank does not come
        pass
    asked: list[FakeRequest] = []
    monkeypatch.setattr(FakeRequest, "test", lambda self: asked.append(self))
    assert not lane.advance() and len(lane.in_flight) == WINDOW + 2
    assert len(asked) == len(set(asked)) == WINDOW


@pytest.mark.parametrize("window", [1, 2])
def test_the_next_buckets_are_copied_while_the_network_is_busy(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All gradients are there, and no reduce-scatter ends: two buckets more than are on the network
    leave the device, in order, and no more, since pinned memory is for as many.
    """
    device, clock = LazyDevice(), FakeClock()
    put_on(monkeypatch, device, chunk_bytes=1 << 20)
    hub = FakeHub(
        SIZE,
        name=name_of_bucket(SIZE, 6),
        clock=clock.now,
        seconds=lambda label, nbytes: 0.0 if label == "AR" else 1.0,
    )
    num_out = SIZE * (window + 2)

    def rank(world: World) -> None:
        model = Chain(6)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(
            inner, model, world=world, bucket_cap_mb=1e-6, window=window
        )
        model.backward()
        await_true(lambda: device.num_copies >= num_out)
        time.sleep(0.05)  # in which there could be more of them
        world.barrier()
        if world.rank == 0:
            assert device.num_copies == num_out
            assert hub.picture(0).split()[:window] == ["RS5", "RS4"][:window]
        world.barrier()
        optimizer.step()
        while not optimizer._built.engine.state.iteration.is_finished():  # type: ignore[union-attr]
            clock.advance(1.0)
            time.sleep(0.001)
        optimizer.close()

    run_ranks(SIZE, rank, hub=hub)
    reduces = [label for label in hub.picture(0).split() if label.startswith("RS")]
    assert reduces == [f"RS{number}" for number in reversed(range(6))]
    assert max(hub.most_in_flight.values()) <= window


@pytest.mark.parametrize("direct", [False, True])
def test_what_waits_for_the_device_is_not_on_the_network_yet(
    direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LazyDevice()
    put_on(monkeypatch, device)
    verdicts = (
        tuple(ProbeVerdict(operation, works=True) for operation in OPERATIONS) if direct else ()
    )
    monkeypatch.setattr("dearmpi.device.route_choice.known_verdicts", lambda: verdicts)
    opened_s: list[float] = []

    def rank(world: World) -> None:
        model, heard = Chain(3), Heard()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world, bucket_cap_mb=1e-6)
        optimizer.spans.recorder, optimizer.spans.iteration = heard, 1
        world.barrier()
        device.host.is_open = False
        world.barrier()
        model.backward()
        optimizer.step()
        time.sleep(0.3)
        world.barrier()
        if world.rank == 0:
            opened_s.append(time.perf_counter())
            device.host.is_open = True
        world.barrier()
        optimizer.synchronize()
        optimizer.spans.recorder = None
        model.backward()
        optimizer.step()
        assert optimizer.times.communication_s < time.perf_counter() - opened_s[0]
        reduced = [span for span in heard.spans if span.track is Track.REDUCE_SCATTER]
        for span in reduced:
            assert span.queued_s is not None
            assert span.queued_s < opened_s[0] <= span.start_s <= span.stop_s
        assert len(reduced) == 3
        optimizer.close()

    run_ranks(SIZE, rank)


def await_true(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.001)
