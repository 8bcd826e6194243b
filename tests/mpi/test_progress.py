"""Progress over MPI: in a thread of its own, or whenever somebody polls."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from dearmpi.comm.api.collectives import Collectives, PointToPoint, Request
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.config import ProgressMode
from dearmpi.errors import CommError
from tests.codes import raises

LIMIT_S = 60.0  # far beyond what any of this takes; reached only by a deadlock
LARGE = 300_000  # elements of a shard: more than MPI sends without asking the receiver
MODES: list[ProgressMode] = ["thread", "poll"]


def make_world(progress: ProgressMode) -> World:
    """A world over a communicator of its own, which a test may break."""
    from dearmpi.comm.backends import mpi

    if progress == "thread" and not mpi.supports_threads():
        pytest.skip("a progress thread needs MPI_THREAD_MULTIPLE")
    return World(mpi.connect(), progress=progress)


@pytest.fixture(params=MODES)
def own_world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = make_world(request.param)
    yield world
    world.close()


@pytest.fixture
def threaded() -> Iterator[World]:
    world = make_world("thread")
    yield world
    world.close()


@pytest.fixture
def polled() -> Iterator[World]:
    world = make_world("poll")
    yield world
    world.close()


def scatter(buffer: Tensor) -> Callable[[Collectives], Request]:
    return lambda c: c.start_reduce_scatter(buffer, "ring")


def gather(buffer: Tensor) -> Callable[[Collectives], Request]:
    return lambda c: c.start_all_gather(buffer)


def pause(chance: random.Random) -> None:
    """Let ranks drift apart by up to 2 ms; how far is of no account."""
    if chance.random() < 0.3:
        time.sleep(chance.random() * 2e-3)


def all_reduce_in_order(world: World, scatters: Channel, gathers: Channel) -> None:
    """Iterations as the engine runs them: a gather is submitted where its scatter finishes."""
    chance = random.Random(world.rank)
    for iteration in range(20):
        buffers = [
            torch.full(((1 + 40 * bucket) * world.size,), float(world.rank + bucket + iteration))
            for bucket in range(6)
        ]
        done: list[int] = []

        def reduced(bucket: int, buffers: list[Tensor] = buffers, done: list[int] = done) -> None:
            gathers.submit(f"AG{bucket}", gather(buffers[bucket]), partial(done.append, bucket))

        for bucket in reversed(range(6)):
            pause(chance)
            scatters.submit(f"RS{bucket}", scatter(buffers[bucket]), partial(reduced, bucket))
            world.progress.poll()
        world.progress.wait_until(lambda done=done: len(done) == 6, what="the gathers")  # type: ignore[misc]
        ranks = sum(range(world.size))
        for bucket, buffer in enumerate(buffers):
            expected = ranks + (bucket + iteration) * world.size
            assert bool((buffer == float(expected)).all())


def test_all_gathers_submitted_where_reduce_scatters_finish(own_world: World) -> None:
    # With a window of 1 they finish, and so are gathered, in one order on all ranks.
    scatters = own_world.open_channel("rs", window=1)
    gathers = own_world.open_channel("ag", window=2)
    all_reduce_in_order(own_world, scatters, gathers)
    scatters.close()
    gathers.close()


def test_the_thread_completes_what_the_main_thread_does_not_wait_for(threaded: World) -> None:
    """The main thread calls nothing of ours, and nothing of MPI, until all is done."""
    channel = threaded.open_channel("rs", window=2)
    buffers = [torch.full((LARGE * threaded.size,), 1.0) for _ in range(4)]
    finished = threading.Semaphore(0)
    for number, buffer in enumerate(buffers):
        channel.submit(f"RS{number}", scatter(buffer), finished.release)
    assert all(finished.acquire(timeout=LIMIT_S) for _ in buffers)
    own = slice(LARGE * threaded.rank, LARGE * (threaded.rank + 1))
    assert all(bool((buffer[own] == float(threaded.size)).all()) for buffer in buffers)


def test_operations_complete_while_the_main_thread_computes(threaded: World) -> None:
    channel = threaded.open_channel("rs", window=2)
    buffer = torch.full((LARGE * threaded.size,), 1.0)
    finished = threading.Event()
    channel.submit("RS0", scatter(buffer), finished.set)
    matrix = torch.eye(64)
    deadline = time.monotonic() + LIMIT_S
    while not finished.is_set():
        matrix = matrix @ matrix
        assert time.monotonic() < deadline, "nothing completed during the computation"
    assert buffer[LARGE * threaded.rank] == threaded.size


@pytest.mark.ranks(at_least=2)
def test_polling_completes_what_is_never_waited_for(polled: World) -> None:
    channel = polled.open_channel("rs", window=2)
    buffer = torch.full((LARGE * polled.size,), 1.0)
    done: list[bool] = []
    channel.submit("RS0", scatter(buffer), partial(done.append, True))
    assert not done
    deadline = time.monotonic() + LIMIT_S
    while not done:
        polled.progress.poll()
        assert time.monotonic() < deadline, "polling completed nothing"
    assert buffer[LARGE * polled.rank] == polled.size


def test_many_small_exchanges_from_the_main_thread(own_world: World) -> None:
    """Each submits, wakes the thread and is woken by it."""
    for number in range(300):
        assert own_world.all_reduce([float(number)]) == [float(number * own_world.size)]


def test_all_lanes_are_served_at_once(own_world: World) -> None:
    """Small exchanges on the world's own channel pass by large ones on another."""
    channel = own_world.open_channel("rs", window=2)
    buffers = [torch.full((LARGE * own_world.size,), 1.0) for _ in range(4)]
    for number, buffer in enumerate(buffers):
        channel.submit(f"RS{number}", scatter(buffer))
        assert own_world.all_reduce([1.0]) == [float(own_world.size)]
    channel.close()
    assert all(buffer[LARGE * own_world.rank] == own_world.size for buffer in buffers)


@pytest.mark.ranks(at_least=2)
def test_a_failed_operation_is_reported_with_rank_and_name(own_world: World) -> None:
    channel = own_world.open_channel("rs", window=2)
    buffer = torch.ones(own_world.size + 1)
    where = f"rank {own_world.rank} on "
    with raises(CommError, "buffer-not-divisible", where, "RS5 (rs lane) failed"):
        channel.run("RS5", scatter(buffer))
    with raises(CommError, "buffer-not-divisible", "RS5"):  # and nothing can be done here any more
        own_world.barrier()


def test_what_mpi_says_of_an_error_is_told(own_world: World) -> None:
    def send_to_nobody(collectives: Collectives) -> Request:
        assert isinstance(collectives, PointToPoint)
        return collectives.start_send(torch.ones(1), own_world.size, 1)

    channel = own_world.open_channel("rs", window=2)
    with raises(CommError, "operation-failed", "RS5 (rs lane) failed") as caught:
        channel.run("RS5", send_to_nobody)
    assert "invalid rank" in str(caught.value).lower()


def test_worlds_of_their_own_do_not_disturb_each_other(world: World, own_world: World) -> None:
    for _ in range(20):
        assert world.all_reduce([1.0]) == own_world.all_reduce([1.0]) == [float(world.size)]


def test_hosts_and_local_ranks_agree(world: World) -> None:
    mine = f"{world.host} {world.local_rank} {world.hosts}"
    texts = world.all_gather_text(mine)
    assert texts[world.rank] == mine
    assert len({text.rsplit(" (")[0] for text in texts}) == world.size  # host and local rank
    assert len({text[text.index("(") :] for text in texts}) == 1
    assert world.hosts[world.rank] == world.host
