"""The wire of in-process ranks: what it takes, and what was posted when."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dearmpi.comm.api.collectives import Buffer, Collectives, Request
from dearmpi.comm.world import World
from tests.fakes import FakeClock, FakeHub
from tests.fakes.ranks import run_ranks
from tests.unit.comm.fake.twins import channels


def test_operations_queue_up_on_one_wire() -> None:
    clock = FakeClock()
    hub = FakeHub(2, seconds=lambda label, nbytes: nbytes / 16, clock=clock.now)
    one, other = channels(hub), channels(hub)  # two channels, the same wire
    first = [c.start_all_gather(torch.ones(4)) for c in one]
    second = [c.start_all_gather(torch.ones(8)) for c in other]
    trail = []
    for _ in range(5):
        trail.append([all(r.test() for r in first), all(r.test() for r in second)])
        clock.advance(0.75)
    assert trail == [
        [False, False],
        [False, False],
        [True, False],  # 1.5 s: the first took 1 s
        [True, False],
        [True, True],  # 3 s: the second took 2 s more
    ]
    assert [(s.start_s, s.stop_s) for s in hub.carried] == [(0.0, 1.0), (1.0, 3.0)]


def test_the_wire_is_idle_until_all_ranks_are_there() -> None:
    clock = FakeClock()
    hub = FakeHub(2, seconds=lambda label, nbytes: 1.0, clock=clock.now)
    twins = channels(hub)
    early = twins[0].start_all_gather(torch.ones(4))
    clock.advance(5.0)
    assert not early.test()
    twins[1].start_all_gather(torch.ones(4))
    clock.advance(0.5)
    assert not early.test()
    clock.advance(0.5)
    assert early.test()


def test_the_exchanges_of_the_world_itself_take_no_time() -> None:
    clock = FakeClock()  # nobody advances it
    hub = FakeHub(2, seconds=lambda label, nbytes: 1.0, clock=clock.now)
    assert run_ranks(2, lambda world: world.all_reduce([1.0]), hub=hub) == [[2.0], [2.0]]


def overlap(hub: FakeHub) -> Callable[[World], None]:
    """What an iteration with two buckets posts, in the manner of DeAR."""

    def run(world: World) -> None:
        scatter, gather = world.open_channel("rs", window=2), world.open_channel("ag", window=1)
        buffers = [torch.ones(2 * world.size), torch.ones(4 * world.size)]
        for bucket in (1, 0):
            scatter.submit(f"RS{bucket}", _scatter(buffers[bucket]))
        scatter.close()
        hub.mark(world.rank)
        for bucket in (0, 1):
            gather.submit(f"AG{bucket}", _gather(buffers[bucket]))
        gather.close()
        world.barrier()

    return run


def _scatter(buffer: Buffer) -> Callable[[Collectives], Request]:
    return lambda c: c.start_reduce_scatter(buffer, "ring")


def _gather(buffer: Buffer) -> Callable[[Collectives], Request]:
    return lambda c: c.start_all_gather(buffer)


def test_what_was_posted_can_be_drawn() -> None:
    hub = FakeHub(3, name=lambda buffer: {6: "0", 12: "1"}.get(buffer.numel(), ""))
    run_ranks(3, overlap(hub), hub=hub)
    for rank in range(3):
        assert hub.picture(rank) == "RS1 RS0 | AG0 AG1"
        # Communicator 0 is the world's own, 1 the one on which its ranks leave.
        assert hub.picture(rank, 2) == "RS1 RS0 |"
        assert hub.picture(rank, 3) == "| AG0 AG1"
        assert hub.most_in_flight[rank, 3] == 1
    assert [span.label for span in hub.carried] == ["RS1", "RS0", "AG0", "AG1"]
