"""What a watchdog asks, answers and reports as time goes by, message by message."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import pytest

from dearmpi.comm.api.collectives import Completed, Request
from dearmpi.comm.watchdog.watchdog import StallLimits, Watchdog
from dearmpi.errors import StallError
from tests.codes import raises
from tests.unit.comm.inbox import HOSTS, Clock, Inbox

LIMITS = StallLimits(warning_s=0.3, abort_s=20.0)
PATIENT = StallLimits(warning_s=5.0, abort_s=60.0)


def test_time_in_which_the_job_was_suspended_is_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, inbox = Clock(monkeypatch), Inbox()
    watchdog = Watchdog(inbox, rank=0, hosts=HOSTS[:2], limits=PATIENT)
    watchdog.begin_wait("RS0")
    for _ in range(3):  # as a scheduler does that lets several jobs take turns
        clock.now_s += 3600.0
        watchdog.check_wait()
    with raises(StallError, "wait-timed-out", "waiting 60 s"):
        for _ in range(200):
            clock.now_s += 0.5
            watchdog.tend()
            watchdog.check_wait()


@pytest.mark.parametrize("is_driven_first", [True, False])
def test_after_a_suspension_a_dead_rank_is_told_as_soon_as_ever(
    is_driven_first: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever thread the system lets go on first."""
    clock, inbox = Clock(monkeypatch), Inbox()
    watchdog = Watchdog(inbox, rank=0, hosts=HOSTS[:2], limits=PATIENT)
    watchdog.begin_wait("RS0")
    watchdog.tend()
    clock.now_s += 3600.0
    if is_driven_first:
        watchdog.tend()
    watchdog.check_wait()
    assert not inbox.sent and not capsys.readouterr().err
    for _ in range(20):
        clock.now_s += 0.5
        watchdog.tend()
        watchdog.check_wait()
    assert inbox.sent and "rank 1 on n1: does not answer" in capsys.readouterr().err


def test_a_rank_at_its_end_outlives_a_suspension_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, inbox = Clock(monkeypatch), Inbox()
    watchdog = Watchdog(inbox, rank=0, hosts=HOSTS[:2], limits=PATIENT)
    other = Watchdog(Inbox(), rank=1, hosts=HOSTS[:2], limits=LIMITS)
    answer = (1, json.dumps({"status": asdict(other.status()), "to": 1}).encode())
    watchdog.leave()
    watchdog.begin_wait("the end of the other ranks' programs")
    for number in range(500):
        clock.now_s += 3600.0 if number == 400 else 0.5
        if inbox.sent:
            inbox.sent.clear()
            inbox.messages.append(answer)
        watchdog.check_wait()  # before anybody could ask again
        watchdog.tend()


def test_an_answer_to_a_question_of_an_earlier_wait_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks may have gone on since, and what was hopeless would be so no more."""
    clock, inbox = Clock(monkeypatch), Inbox()
    watchdog = Watchdog(inbox, rank=0, hosts=HOSTS[:2], limits=PATIENT)
    other = Watchdog(Inbox(), rank=1, hosts=HOSTS[:2], limits=LIMITS)
    other.leave()
    late = json.dumps({"status": asdict(other.status()), "to": 1}).encode()
    with watchdog.exchange():
        for what in ("one exchange", "another"):
            watchdog.begin_wait(what)
            clock.now_s += 6.0
            watchdog.tend()  # asks
            watchdog.end_wait()
        watchdog.begin_wait("a third")
        inbox.messages.append((1, late))
        clock.now_s += 6.0
        watchdog.tend()
        watchdog.check_wait()
        inbox.messages.append((1, late.replace(b'"to": 1', b'"to": 3')))
        clock.now_s += 1.0
        watchdog.tend()
        with raises(StallError, "ranks-out-of-step", "different order"):
            watchdog.check_wait()


def test_an_answer_of_long_ago_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host of a rank that was slow may be cut off a minute later."""
    clock, inbox = Clock(monkeypatch), Inbox()
    watchdog = Watchdog(inbox, rank=0, hosts=HOSTS[:2], limits=PATIENT)
    watchdog.begin_wait("RS0")
    other = Watchdog(Inbox(), rank=1, hosts=HOSTS[:2], limits=LIMITS)
    with raises(StallError, "wait-timed-out") as caught:
        for _ in range(200):
            clock.now_s += 0.5
            if inbox.sent in ([1], [1, -1, 1]):  # the early look, and the first after the limit
                answer = {"status": asdict(other.status()), "to": (len(inbox.sent) + 1) // 2}
                inbox.messages.append((1, json.dumps(answer).encode()))
                inbox.sent.append(-1)
            watchdog.tend()
            watchdog.check_wait()
    assert "has begun 0 backprops, does not wait" in capsys.readouterr().err
    said = r"rank 1 on .*: does not answer \(.*\); 5\d s ago it has begun 0 backprops"
    assert re.search(said, str(caught.value)), str(caught.value)


def test_the_questions_of_many_ranks_are_answered_at_once() -> None:
    """They come together where all wait for one, and who is late is called stopped."""
    inbox = Inbox(*((rank, b'{"request": 1}') for rank in range(1, 1000)))
    Watchdog(inbox, rank=0, hosts=HOSTS[:1000], limits=LIMITS).tend()
    assert inbox.sent == list(range(1, 1000))


class Shy:
    """Shows a question only to who looks several times; keeps the answers."""

    def __init__(self) -> None:
        self.looks = 0
        self.answers: list[int] = []

    def receive_message(self) -> tuple[int, bytes] | None:
        self.looks += 1
        return (1, b'{"request": 1}') if self.looks == 5 else None

    def start_message(self, data: bytes, destination: int) -> Request:
        self.answers.append(destination)
        return Completed()


def test_a_question_behind_other_messages_is_answered_at_once() -> None:
    """A rank that computes looks for questions rarely; MPI may need several looks to find one."""
    messenger = Shy()
    Watchdog(messenger, rank=0, hosts=HOSTS[:2], limits=LIMITS).tend()
    assert messenger.answers == [1]


def test_who_is_asked_by_a_lower_rank_leaves_questions_and_report_to_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the end of a program too: else all ranks would ask all others as long as one works."""
    for has_left in (False, True):
        clock, inbox = Clock(monkeypatch), Inbox()
        watchdog = Watchdog(inbox, rank=2, hosts=HOSTS[:3], limits=PATIENT)
        if has_left:
            watchdog.leave()
        watchdog.begin_wait("RS0")
        question = json.dumps({"request": 1, "left": has_left}).encode()
        for half_second in range(80):
            if half_second % 10 == 0:  # as long as it waits it asks, every 5 s
                inbox.messages.append((1, question))
            clock.now_s += 0.5
            watchdog.tend()
            watchdog.check_wait()
        assert inbox.sent[0] == 1 and 0 not in inbox.sent
        assert not capsys.readouterr().err


def test_who_is_asked_no_more_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other rank's wait is over, or its host cut off; this one's may have become hopeless."""
    clock, inbox = Clock(monkeypatch), Inbox()
    watchdog = Watchdog(inbox, rank=1, hosts=HOSTS[:2], limits=PATIENT)
    other = Watchdog(Inbox(), rank=0, hosts=HOSTS[:2], limits=LIMITS)
    other.leave()
    answer = json.dumps({"status": asdict(other.status()), "to": 1}).encode()
    with watchdog.exchange():
        watchdog.begin_wait("all-reduce of values")
        inbox.messages.append((0, b'{"request": 1}'))
        watchdog.tend()
        assert inbox.sent == [0]  # its answer
        with raises(StallError, "ranks-out-of-step", "but rank 0 has ended"):
            for _ in range(40):
                clock.now_s += 0.5
                if len(inbox.sent) == 2:
                    inbox.messages.append((0, answer))
                watchdog.tend()
                watchdog.check_wait()
    assert clock.now_s < 1000.0 + 5.0 + 2 * 2.0 + 2.0, "found when questions had ceased"


def test_a_rank_that_has_ended_is_a_single_line() -> None:
    """Of hundreds that wait for one, frames of this package would hide the one that counts."""
    watchdog = Watchdog(Inbox(), rank=0, hosts=HOSTS[:1], limits=LIMITS)
    assert __file__ in str(watchdog.status().stack)
    watchdog.leave()
    assert watchdog.status().stack == ()


def test_a_world_of_one_waits_for_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for an update that takes long: nobody has left it alone."""
    clock = Clock(monkeypatch)
    watchdog = Watchdog(Inbox(), rank=0, hosts=HOSTS[:1], limits=PATIENT)
    watchdog.begin_wait("the parameters of bucket 0")
    for _ in range(20):
        clock.now_s += 0.5
        watchdog.tend()
        watchdog.check_wait()
    watchdog.end_wait()
    assert "waits 6 s for the parameters of bucket 0" in capsys.readouterr().err
