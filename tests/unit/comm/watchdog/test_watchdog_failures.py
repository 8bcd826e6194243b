"""Messages between watchdogs that fail end the diagnosis, and no run."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict

import pytest

from dearmpi.comm.api.collectives import Request
from dearmpi.comm.watchdog.watchdog import StallLimits, Watchdog
from dearmpi.comm.world import World
from dearmpi.errors import StallError
from tests.codes import raises
from tests.fakes import FakeCollectives, FakeHub
from tests.unit.comm.inbox import HOSTS, Clock, Inbox

LIMITS = StallLimits(warning_s=5.0, abort_s=60.0)
FAILED = "a message between watchdogs failed: OSError: [Errno 24] Too many open files"


class Crowded(Inbox):
    """Where no messages can be sent to ranks from 3 on."""

    def start_message(self, data: bytes, destination: int) -> Request:
        if destination >= 3:
            raise OSError(24, "Too many open files")
        return super().start_message(data, destination)


class Lost(Request):
    """A message of which it is only found later that it cannot be sent."""

    def test(self) -> bool:
        raise OSError(24, "Too many open files")


class Losing(Inbox):
    """Where that happens to all."""

    def start_message(self, data: bytes, destination: int) -> Request:
        super().start_message(data, destination)
        return Lost()


def wait(watchdog: Watchdog, clock: Clock, seconds: float) -> None:
    for _ in range(round(2 * seconds)):
        clock.now_s += 0.5
        watchdog.tend()
        watchdog.check_wait()


@pytest.mark.parametrize("messenger", [Crowded, Losing])
def test_a_rank_whose_question_fails_says_so_once_and_asks_no_more(
    messenger: type[Inbox], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, inbox = Clock(monkeypatch), messenger()
    watchdog = Watchdog(inbox, rank=0, hosts=HOSTS[:6], limits=LIMITS)
    for what in ("RS0", "RS1", "RS2"):  # which all come in the end
        watchdog.begin_wait(what)
        wait(watchdog, clock, 50.0)
        watchdog.end_wait()
    assert inbox.sent in ([1, 2], [1, 2, 3, 4, 5])
    told = capsys.readouterr().err
    assert told.count(f"[rank 0 on n0] {FAILED}; this rank continues") == 1
    assert "raise ulimit -n" in told


def test_a_wait_without_answers_ends_at_its_limit_and_says_why_it_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the end of a program too: nobody could tell work from a host that is cut off."""
    for has_left in (False, True):
        clock = Clock(monkeypatch)
        watchdog = Watchdog(Crowded(), rank=0, hosts=HOSTS[:6], limits=LIMITS)
        if has_left:
            watchdog.leave()
        watchdog.begin_wait("RS0")
        wait(watchdog, clock, LIMITS.abort_s)
        with raises(StallError, "wait-timed-out", " s for RS0") as caught:
            wait(watchdog, clock, 5.0)
        assert "was not polled, since messages failed: OSError: [Errno 24]" in str(caught.value)


def test_a_rank_that_cannot_ask_answers_whom_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, inbox = Clock(monkeypatch), Crowded()
    watchdog = Watchdog(inbox, rank=0, hosts=HOSTS[:6], limits=LIMITS)
    inbox.messages += [(rank, b'{"request": 1}') for rank in (4, 1, 5, 2)]
    clock.now_s += 0.5
    watchdog.tend()
    assert inbox.sent == [1, 2]


def test_a_rank_that_cannot_ask_leaves_it_to_any_that_can(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the end of a program, where it would give up the ranks that answer the other."""
    clock, inbox = Clock(monkeypatch), Crowded()
    watchdog = Watchdog(inbox, rank=0, hosts=HOSTS[:6], limits=LIMITS)
    watchdog.leave()
    watchdog.begin_wait("the end of the other ranks' programs")
    wait(watchdog, clock, 5.5)
    assert FAILED in capsys.readouterr().err
    for _ in range(30):
        inbox.messages.append((1, b'{"request": 1, "left": true}'))
        wait(watchdog, clock, 5.0)
    assert "status of the ranks" not in capsys.readouterr().err


def test_a_message_that_nobody_understands_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, inbox = Clock(monkeypatch), Inbox()
    watchdog = Watchdog(inbox, rank=0, hosts=HOSTS[:2], limits=LIMITS)
    status = asdict(Watchdog(Inbox(), rank=1, hosts=HOSTS[:2], limits=LIMITS).status())
    strange = json.dumps({"status": {**status, "mood": "good"}, "to": 1}).encode()
    inbox.messages += [(1, strange), (1, b'{"request": 1}')]
    clock.now_s += 0.5
    watchdog.tend()
    assert inbox.sent == [1] and "mood" in capsys.readouterr().err


def test_a_rank_without_messages_waits_for_what_comes_all_the_same(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Cut(FakeCollectives):
        def receive_message(self) -> tuple[int, bytes] | None:
            raise OSError("the connection is cut")

    hub, came = FakeHub(1), threading.Event()
    world = World(FakeCollectives(hub, 0))
    world.progress.watch(Watchdog(Cut(hub, 0), rank=0, hosts=HOSTS[:1], limits=LIMITS))
    threading.Timer(1.0, came.set).start()
    world.progress.wait_until(came.is_set, what="RS0")
    assert world.all_reduce([2.0]) == [2.0]
    world.close()
    assert capfd.readouterr().err.count("failed: OSError: the connection is cut") == 1
