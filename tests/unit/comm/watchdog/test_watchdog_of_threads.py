"""Several threads of a process may wait at a time, and what is told of one is not of another."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import asdict

import pytest

from dearmpi.comm.watchdog.waits import Status
from dearmpi.comm.watchdog.watchdog import StallLimits, Watchdog
from dearmpi.errors import StallError
from tests.codes import raises
from tests.unit.comm.inbox import HOSTS, Clock, Inbox

LIMITS = StallLimits(warning_s=5.0, abort_s=60.0)


class Second:
    """Another thread of this process, which does as it is told."""

    def __init__(self) -> None:
        self._actions: list[Callable[[], object]] = []
        self._told, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def __call__(self, action: Callable[[], object]) -> None:
        """Have it call ``action``; raises what that raises."""
        self._actions.append(action)
        self._told.release()
        assert self._done.acquire(timeout=60.0)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while self._told.acquire():
            try:
                self._actions.pop(0)()
            except BaseException as error:
                self._failure = error
            self._done.release()


class Rank:
    """Rank 0 of two, with two threads, and what it has of the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.inbox, self.second = Clock(monkeypatch), Inbox(), Second()
        self.watchdog = Watchdog(self.inbox, rank=0, hosts=HOSTS[:2], limits=LIMITS)
        self.other = Watchdog(Inbox(), rank=1, hosts=HOSTS[:2], limits=LIMITS)
        self._num_answered = 0

    def drive(self, seconds: float) -> None:
        """Time goes by, in which the other rank answers what it is asked."""
        for _ in range(round(2 * seconds)):
            self.clock.now_s += 0.5
            self.watchdog.tend()
            if len(self.inbox.sent) > self._num_answered:
                self._num_answered = len(self.inbox.sent)
                answer = {"status": asdict(self.other.status()), "to": self._num_answered}
                self.inbox.messages.append((1, json.dumps(answer).encode()))


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def test_a_wait_beside_another_one_is_told_as_what_it_is(
    rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    watchdog = rank.watchdog
    watchdog.begin_wait("RS0")
    rank.drive(4.0)
    rank.second(lambda: watchdog.begin_wait("AG7"))
    rank.drive(3.0)
    watchdog.check_wait()
    told = capsys.readouterr().err
    assert told.startswith("waited 7 s for RS0; status of the ranks:")
    assert "rank 0 on n0: has begun 0 backprops, waits 7 s for RS0" in told
    rank.second(watchdog.check_wait)
    assert not capsys.readouterr().err, "it has not lasted long"
    rank.drive(4.0)
    rank.second(watchdog.check_wait)
    told = capsys.readouterr().err
    assert told.startswith("waited 7 s for AG7; status of the ranks:")
    assert "rank 0 on n0: has begun 0 backprops, waits 7 s for AG7" in told
    assert "_run" in told.split("rank 1 ")[0], "the place of the thread that waits for it"


def test_a_wait_that_ends_ends_no_other_one(rank: Rank, capsys: pytest.CaptureFixture[str]) -> None:
    watchdog = rank.watchdog
    watchdog.begin_wait("RS0")
    rank.drive(4.0)
    rank.second(lambda: watchdog.begin_wait("AG7"))
    rank.second(watchdog.end_wait)
    assert watchdog.status().waiting == "RS0"
    rank.drive(3.0)
    watchdog.check_wait()
    assert "waited 7 s for RS0" in capsys.readouterr().err
    with raises(StallError, "wait-timed-out", " s for RS0"):
        for _ in range(120):
            rank.drive(0.5)
            watchdog.check_wait()


def test_others_are_told_of_the_thread_that_trains(rank: Rank) -> None:
    """It may yet do what they wait for, even while another thread waits."""
    watchdog = rank.watchdog
    rank.second(lambda: watchdog.begin_wait("AG7"))
    assert watchdog.status().waiting == ""
    assert re.search(r"test_watchdog_of_threads", str(watchdog.status().stack))
    rank.second(watchdog.begin_step)
    assert watchdog.status().waiting == "AG7"


def test_a_wait_beside_the_thread_that_trains_is_not_hopeless(rank: Rank) -> None:
    """Where another rank waits for what that thread may yet do; but if it has ended, it is."""
    watchdog, other = rank.watchdog, rank.other
    watchdog.begin_backprop()
    watchdog.begin_step()
    with other.exchange():
        other.begin_wait("all-reduce of values")
        rank.second(lambda: watchdog.begin_wait("AG7"))
        waits, own = other.status(), watchdog.status()
        assert waits.waits_for(own) and _as_if_waiting(own).waits_for(waits)
        rank.drive(7.0)
        rank.second(watchdog.check_wait)
        other.end_wait()
    other.leave()
    rank.drive(6.0)
    with raises(StallError, "ranks-out-of-step", "waits 13 s for AG7, ", "but rank 1 has ended"):
        rank.second(watchdog.check_wait)


def _as_if_waiting(status: Status) -> Status:
    return Status(**{**asdict(status), "waiting": "AG7", "stack": status.stack})


def test_a_wait_in_the_middle_of_another_is_told_of_and_leaves_that_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a signal handler that reads the model while its thread waits."""
    clock, inbox = Clock(monkeypatch), Inbox()
    watchdog = Watchdog(inbox, rank=0, hosts=HOSTS[:2], limits=LIMITS)
    with watchdog.exchange():
        outer = watchdog.begin_wait("all-reduce of values")
        assert watchdog.status().in_exchange
        clock.now_s += 2.0
        inner = watchdog.begin_wait("the parameters of bucket 0")
        told = watchdog.status()
        assert not told.in_exchange and told.waited_s == 0.0
        assert told.waiting == (
            "the parameters of bucket 0 (in a handler that interrupted the wait for "
            "all-reduce of values)"
        )
        with watchdog.exchange():
            watchdog.begin_wait("broadcast")
            assert watchdog.status().in_exchange
            watchdog.end_wait()
        watchdog.check_wait()
        watchdog.end_wait(inner)
        assert watchdog.status().in_exchange
        assert watchdog.status().waiting == "all-reduce of values"
        assert watchdog.status().waited_s == 2.0
        watchdog.check_wait()
        watchdog.end_wait(outer)
    assert watchdog.status().waiting == ""
    watchdog.begin_wait("RS0")
    assert not watchdog.status().in_exchange
