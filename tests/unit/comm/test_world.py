"""World: exchanges between ranks outside of training, channels, and how a process finds it."""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dearmpi.comm.backends
from dearmpi.comm import lifecycle as module
from dearmpi.comm.api.collectives import Collectives, Request
from dearmpi.comm.backends.alone import AloneCollectives
from dearmpi.comm.lifecycle import connect
from dearmpi.comm.messages.values import HostBuffer
from dearmpi.comm.watchdog.watchdog import StallLimits
from dearmpi.comm.world import World
from dearmpi.config import ProgressMode
from dearmpi.errors import CommError, ConfigError, LaunchError
from tests.codes import raises
from tests.fakes import FakeCollectives, FakeHub
from tests.fakes.ranks import run_ranks

# Lone surrogates stand for the undecodable bytes of file names.
TEXTS = st.lists(st.text(st.characters(exclude_categories=())), min_size=1, max_size=4)
MODES: list[ProgressMode] = ["thread", "poll"]


@given(TEXTS)
def test_any_text_reaches_every_rank(texts: list[str]) -> None:
    results = run_ranks(len(texts), lambda world: world.all_gather_text(texts[world.rank]))
    assert results == [texts] * len(texts)


@pytest.mark.parametrize(
    "text", ["", "\0", "\udcff", "\x01", "a\0\0", "a\x01", "\0\x01\0", "é" * 1000]
)
def test_texts_that_look_like_padding_survive(text: str) -> None:
    texts = [text, "x", text]
    results = run_ranks(3, lambda world: world.all_gather_text(texts[world.rank]))
    assert results == [texts] * 3


def test_the_text_of_rank_0_is_broadcast() -> None:
    def talk(world: World) -> tuple[str, str, str]:
        mine = "plan é" if world.is_root else None
        other = world.broadcast_text(f"from {world.rank}")
        return world.broadcast_text(mine), other, world.broadcast_text(None)

    assert run_ranks(3, talk) == [("plan é", "from 0", "")] * 3


@pytest.mark.parametrize("progress", MODES)
def test_values_are_reduced_one_by_one(progress: ProgressMode) -> None:
    def reduce(world: World) -> list[list[float]]:
        values = [float(world.rank), -2.0 * world.rank, 0.5]
        return [
            world.all_reduce(values),
            world.all_reduce(values, "max"),
            world.all_reduce(values, op="min"),
            world.all_reduce([]),
        ]

    assert (
        run_ranks(4, reduce, progress=progress)
        == [[[6.0, -12.0, 2.0], [3.0, 0.0, 0.5], [0.0, -6.0, 0.5], []]] * 4
    )


def test_a_number_by_itself_is_a_list_of_one() -> None:
    two: Any = np.array(2.0)
    assert run_ranks(2, lambda world: world.all_reduce(two)) == [[4.0]] * 2


def test_an_unknown_reduction_is_refused_before_it_is_begun() -> None:
    """One that fails on the thread that drives progress would end everything."""

    def reduce(world: World) -> list[float]:
        with raises(ConfigError, "unknown-choice", "avg", "sum, max, min, mean"):
            world.all_reduce([1.0], "avg")  # type: ignore[arg-type]
        return world.all_reduce([1.0])

    assert run_ranks(2, reduce) == [[2.0]] * 2


def test_values_that_are_not_finite_stay_so() -> None:
    def reduce(world: World) -> list[float]:
        return world.all_reduce([math.nan if world.rank else 1.0, math.inf], "sum")

    for nan, infinity in run_ranks(2, reduce):
        assert math.isnan(nan) and infinity == math.inf


def test_local_rank_counts_the_ranks_of_a_host() -> None:
    hub = FakeHub(5, hosts=["n0", "n1", "n0", "n1", "n0"])
    worlds = run_ranks(5, lambda world: (world.rank, world.host, world.local_rank), hub=hub)
    assert worlds == [(0, "n0", 0), (1, "n1", 0), (2, "n0", 1), (3, "n1", 1), (4, "n0", 2)]


def test_every_rank_knows_all_hosts_and_who_speaks() -> None:
    hub = FakeHub(2, hosts=["n0", "n1"])
    results = run_ranks(2, lambda world: (world.size, world.hosts, world.is_root), hub=hub)
    assert results == [(2, ("n0", "n1"), True), (2, ("n0", "n1"), False)]


def test_broadcast_overwrites_all_but_the_root() -> None:
    def receive(world: World) -> list[float]:
        buffer = HostBuffer(np.full(3, float(world.rank)))
        world.broadcast(buffer, root=2)
        return [float(value) for value in buffer.array]

    assert run_ranks(3, receive) == [[2.0, 2.0, 2.0]] * 3


@pytest.mark.parametrize("root", [-1, 2])
def test_a_root_outside_of_the_world_is_refused(root: int) -> None:
    def broadcast(world: World) -> None:
        world.broadcast(HostBuffer(np.zeros(1)), root=root)

    with raises(ConfigError, "out-of-range", root, 2):
        run_ranks(2, broadcast)


def test_all_gather_collects_the_shards() -> None:
    def gather(world: World) -> list[int]:
        buffer = HostBuffer(np.full(6, 10 * world.rank, dtype=np.int64))
        world.all_gather(buffer)
        return [int(value) for value in buffer.array]

    assert run_ranks(3, gather) == [[0, 0, 10, 10, 20, 20]] * 3


def test_nobody_passes_a_barrier_before_everybody_is_there() -> None:
    arrived: list[int] = []

    def meet(world: World) -> int:
        arrived.append(world.rank)
        world.barrier()
        return len(arrived)

    assert run_ranks(4, meet) == [4] * 4


@pytest.mark.parametrize("progress", MODES)
def test_channels_have_orders_of_their_own(progress: ProgressMode) -> None:
    """Ranks may use two channels in different orders, as long as each agrees with itself."""

    def exchange(world: World) -> list[float]:
        channels = [world.open_channel(name, window=2) for name in ("rs", "ag")]
        buffers = [HostBuffer(np.full(2, float(world.rank + 10 * c))) for c in range(2)]
        done: list[int] = []
        for index in (0, 1) if world.is_root else (1, 0):
            buffer = buffers[index]
            channels[index].submit(
                f"AR{index}",
                partial(_start_sum, buffer),
                partial(done.append, index),
            )
        world.progress.wait_until(lambda: len(done) == 2, what="both")
        for channel in channels:
            channel.close()
        return [float(buffer.array[0]) for buffer in buffers]

    assert run_ranks(2, exchange, progress=progress) == [[1.0, 21.0]] * 2


def _start_sum(buffer: HostBuffer, collectives: Collectives) -> Request:
    return collectives.start_all_reduce(buffer, "sum")


def test_a_closed_world_refuses_to_wait() -> None:
    def close(world: World) -> None:
        world.barrier()
        world.close()
        world.close()
        with raises(CommError, "world-closed"):
            world.barrier()

    run_ranks(2, close)


@pytest.mark.parametrize("progress", MODES)
def test_a_world_of_one_needs_nobody(progress: ProgressMode) -> None:
    world = World(AloneCollectives(), progress=progress)
    try:
        assert (world.rank, world.size, world.local_rank, world.is_root) == (0, 1, 0, True)
        assert world.hosts == (world.host,)
        assert world.all_reduce([3.0, 4.0]) == [3.0, 4.0]
        assert world.all_gather_text("é\0") == ["é\0"]
        assert world.broadcast_text("plan") == "plan"
        world.barrier()
        channel = world.open_channel("rs", window=2)
        buffer = HostBuffer(np.arange(3.0))
        channel.run("RS0", lambda c: c.start_reduce_scatter(buffer, "ring"))
        channel.run("AG0", lambda c: c.start_all_gather(buffer))
        assert buffer.array.tolist() == [0.0, 1.0, 2.0]
        channel.close()
    finally:
        world.close()


@pytest.fixture
def _no_mpi(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that is not connected yet, on a machine without MPI."""
    monkeypatch.setattr(module._Process, "world", None)
    monkeypatch.setattr(module._Process, "progress", "thread")
    monkeypatch.setitem(sys.modules, "dearmpi.comm.backends.mpi", None)
    monkeypatch.delattr(dearmpi.comm.backends, "mpi", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # a failed start replaces it
    yield
    if module._Process.world is not None:
        module._Process.world.close()
        atexit.unregister(module._Process.world.close)


@pytest.mark.usefixtures("_no_mpi")
def test_without_mpi_a_process_is_a_world_of_its_own() -> None:
    hook = sys.excepthook
    world = connect()
    assert sys.excepthook is hook  # alone there is nobody to take along
    assert world.size == 1
    assert connect() is world


@pytest.mark.usefixtures("_no_mpi")
def test_without_mpi_several_ranks_are_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "4")
    with raises(LaunchError, "mpi-not-loaded", 4, "pip install 'dearmpi[mpich]'"):
        connect()


@pytest.mark.usefixtures("_no_mpi")
def test_without_mpi_a_communicator_is_not_ignored() -> None:
    with raises(LaunchError, "mpi-not-loaded", "comm is given", "pip install 'dearmpi[mpich]'"):
        connect(comm=object())
    assert connect().size == 1


@pytest.mark.parametrize(("num_launched", "is_refused"), [(1, True), (4, False)])
def test_a_communicator_of_one_rank_is_of_a_job_that_mpi_sees(
    num_launched: int,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    replace_mpi(monkeypatch, AloneCollectives(), num_launched=num_launched)
    monkeypatch.setattr(module, "_limit_end_alone", lambda _: None)
    monkeypatch.setenv("PMI_SIZE", "4")
    if is_refused:
        with raises(LaunchError, "launcher-mismatch", 4):
            module._connect("thread", None, object())
    else:
        module._connect("thread", None, object()).close()
        assert capsys.readouterr().err == "[rank 0 on n0] trains alone\n"


@pytest.mark.parametrize(("first", "other"), [("thread", "poll"), ("poll", "thread")])
@pytest.mark.usefixtures("_no_mpi")
def test_progress_is_chosen_once(first: ProgressMode, other: ProgressMode) -> None:
    world = connect(first)
    assert connect(first) is world
    assert connect() is world
    with raises(ConfigError, "connected-differently", other, first):
        connect(other)


def replace_mpi(
    monkeypatch: pytest.MonkeyPatch,
    collectives: Collectives,
    *,
    serves_any_thread: bool = True,
    num_launched: int = 1,
) -> None:
    mpi = SimpleNamespace(
        connect=lambda comm: collectives,
        describe_missing=lambda: "ranks of it",
        has_others=lambda: num_launched > 1,
        find_alone=lambda comm: "trains alone" if num_launched > 1 else "",
        origin_in_job=lambda: "rank 0 on n0",
        supports_threads=lambda: serves_any_thread,
        serves_any_thread=lambda: serves_any_thread,
    )
    monkeypatch.setitem(sys.modules, "dearmpi.comm.backends.mpi", mpi)
    monkeypatch.setattr("dearmpi.comm.backends.mpi", mpi, raising=False)


@pytest.mark.parametrize("serves_any_thread", [False, True])
def test_a_world_knows_which_threads_may_call_mpi(
    serves_any_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_mpi(monkeypatch, AloneCollectives(), serves_any_thread=serves_any_thread)
    world = module._connect("thread", None)
    assert world.serves_any_thread == serves_any_thread
    assert world.progress.mode == ("thread" if serves_any_thread else "poll")
    world.close()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("asked", ["thread", "poll"])
def test_a_library_that_allows_no_thread_is_told_of_once(
    rank: int,
    asked: ProgressMode,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub = FakeHub(2)
    other = threading.Thread(target=lambda: World(FakeCollectives(hub, 1 - rank), progress="poll"))
    other.start()
    replace_mpi(monkeypatch, FakeCollectives(hub, rank), serves_any_thread=False)
    module._connect(asked, None).close()
    other.join()
    told = capsys.readouterr().err
    if rank == 0 and asked == "thread":
        assert "does not grant MPI_THREAD_MULTIPLE" in told and "world.barrier()" in told
    else:
        assert told == ""


def test_a_rank_that_cannot_connect_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They wait for it in MPI, and nothing else would end them yet."""

    class Left(FakeCollectives):
        def abort(self, code: int) -> None:
            codes.append(code)

    codes: list[int] = []
    hub = FakeHub(2)  # whose rank 1 never comes
    replace_mpi(monkeypatch, Left(hub, 0))
    with raises(CommError, "wait-timed-out"):
        module._connect("thread", StallLimits(warning_s=0.1, abort_s=0.3))
    assert codes == [CommError.exit_code]
    assert "[rank 0 on fakehost] rank 0 on " in capsys.readouterr().err


def test_a_fork_of_the_process_does_not_leave_for_it() -> None:
    """Its end is not that of the rank; it has no thread that could say so."""

    def rank(world: World) -> int:
        child = os.fork()
        if not child:
            os._exit(0 if world.is_closed else 1)
        _, status = os.waitpid(child, 0)
        assert not world.is_closed
        return os.waitstatus_to_exitcode(status)

    assert run_ranks(1, rank) == [0]
