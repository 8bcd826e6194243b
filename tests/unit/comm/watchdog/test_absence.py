"""In poll mode a rank whose main thread is elsewhere says where, since it cannot answer others."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dearmpi.comm.messages.values import HostBuffer
from dearmpi.comm.watchdog.waits import Absence
from dearmpi.comm.watchdog.watchdog import StallLimits, Watchdog
from dearmpi.comm.world import World
from dearmpi.errors import StallError
from tests.codes import raises
from tests.fakes import FakeCollectives, FakeHub
from tests.unit.comm.inbox import HOSTS, Clock, Inbox


class Rank:
    """Rank 1, which last drove communication at ``driven_s``."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.driven_s = clock, clock.now_s
        self.under_way = ["AG1", "AG0"]
        self.absence = Absence(
            origin="rank 1 on n1",
            warning_s=4.0,
            driven_at=lambda: self.driven_s,
            under_way=lambda: self.under_way,
        )

    def look_after(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.absence.look()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(Clock(monkeypatch))


def test_an_absence_is_told_of_once_with_its_place_and_the_cure(
    rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        rank.look_after(1.0)
    assert capsys.readouterr().err == ""
    for _ in range(5):
        rank.look_after(1.0)
    told = capsys.readouterr().err
    assert told.count("[rank 1 on n1] has not polled for 4 s") == 1
    assert "AG1, AG0" in told and "test_absence.py" in told
    assert "world.barrier()" in told and "progress='thread'" in told
    rank.driven_s = rank.clock.now_s
    for _ in range(5):
        rank.look_after(1.0)
    assert "has not polled for 4 s" in capsys.readouterr().err


def test_nothing_is_told_where_nothing_is_under_way_or_the_process_was_suspended(
    rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    rank.look_after(1.0)
    rank.driven_s = rank.clock.now_s
    rank.look_after(100.0)  # it was suspended, and has yet to go on
    rank.driven_s = rank.clock.now_s
    rank.under_way = []
    for _ in range(9):
        rank.look_after(1.0)
    assert capsys.readouterr().err == ""


def test_a_rank_that_polls_looks_in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    texts: list[str] = []

    def say(text: str) -> None:
        if "its AG0." in text:  # not of a connection that takes long
            texts.append(text)
            told.set()

    monkeypatch.setattr("dearmpi.comm.watchdog.waits.safe_output.write", say)
    hub, limits = FakeHub(2), StallLimits(warning_s=0.5, abort_s=60.0)
    other = threading.Thread(target=lambda: World(FakeCollectives(hub, 1), progress="poll"))
    other.start()
    world = World(FakeCollectives(hub, 0), progress="poll", stall_limits=limits)
    other.join()
    buffer = HostBuffer(np.zeros(2))
    world._farewell.submit("AG0", lambda c: c.start_all_gather(buffer))  # rank 1 never joins it
    world.progress.poll()
    assert told.wait(60.0)
    assert "[rank 0 on fakehost]" in texts[0]
    world.close()


def test_a_silent_rank_is_said_to_be_elsewhere_where_ranks_poll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    limits = StallLimits(warning_s=5.0, abort_s=60.0)
    watchdog = Watchdog(Inbox(), rank=0, hosts=HOSTS[:2], limits=limits, polls=True)
    watchdog.begin_wait("the parameters of bucket 0")
    with raises(StallError, "wait-timed-out") as caught:
        for _ in range(200):
            clock.now_s += 0.5
            watchdog.tend()
            watchdog.check_wait()
    told = str(caught.value)
    assert "rank 1 on n1: does not answer: with progress='poll'" in told
    assert "MPI call of the script's own" in told and "world.barrier()" in told
