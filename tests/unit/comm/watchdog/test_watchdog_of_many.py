"""Of many ranks that wait few ask, at the end of their programs too: what they judge then."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from dearmpi.comm.api.collectives import Completed, Request
from dearmpi.comm.watchdog.watchdog import StallLimits, Watchdog
from dearmpi.errors import StallError
from tests.codes import raises
from tests.unit.comm.inbox import HOSTS, Clock, Inbox

LIMITS = StallLimits(warning_s=5.0, abort_s=60.0)
QUESTION = b'{"request": 1, "left": true}'


class Ended:
    """Rank 1 of 3 at the end of its program; rank 2 works on, and answers if it is to."""

    def __init__(self, clock: Clock) -> None:
        self.inbox = Inbox()
        self._clock = clock
        self._watchdog = Watchdog(self.inbox, rank=1, hosts=HOSTS[:3], limits=LIMITS)
        self._status = asdict(Watchdog(Inbox(), rank=2, hosts=HOSTS[:3], limits=LIMITS).status())
        self._watchdog.leave()
        self._watchdog.begin_wait("the end of the other ranks' programs")
        self._num_requests = 0

    def wait(self, seconds: float, *, asked: bool = False, answered: bool = False) -> None:
        """WatchedWait on, while rank 0 asks every 5 s if it does, and questions are answered."""
        for half_second in range(round(2 * seconds)):
            self._clock.now_s += 0.5
            if asked and half_second % 10 == 0:
                self.inbox.messages.append((0, QUESTION))
            if answered and self.inbox.sent[-2:] == [0, 2]:
                self._answer()
            self._watchdog.tend()
            self._watchdog.check_wait()

    def _answer(self) -> None:
        self._num_requests += 1
        answer = json.dumps({"status": self._status, "to": self._num_requests}).encode()
        self.inbox.messages += [(0, answer), (2, answer)]
        self.inbox.sent.clear()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Ended:
    return Ended(Clock(monkeypatch))


def test_a_rank_that_another_one_asks_waits_as_long_as_that_one(ended: Ended) -> None:
    """It does not ask itself: of hundreds at their end one asks the one that works on."""
    ended.wait(10 * LIMITS.abort_s, asked=True)
    assert set(ended.inbox.sent) == {0}, "answers"


def test_when_the_other_one_has_ceased_it_asks_itself_and_waits_on(ended: Ended) -> None:
    """As where that one was still training, and now works on as well."""
    ended.wait(2 * LIMITS.abort_s, asked=True)
    ended.inbox.sent.clear()
    ended.wait(2 * LIMITS.abort_s, answered=True)


def test_when_the_other_one_has_ceased_and_nobody_answers_it_gives_up(ended: Ended) -> None:
    """Their host was cut off, with the rank that asked for all."""
    ended.wait(2 * LIMITS.abort_s, asked=True)
    with raises(StallError, "wait-timed-out", "ranks 0, 2 ", ": each does not answer"):
        ended.wait(LIMITS.warning_s + 10.0)


class Linked(Inbox):
    """That of one rank of many whose messages arrive."""

    def __init__(self, rank: int, inboxes: list[Linked]) -> None:
        super().__init__()
        self.num_questions = 0
        self._rank, self._inboxes = rank, inboxes

    def start_message(self, data: bytes, destination: int) -> Request:
        self._inboxes[destination].messages.append((self._rank, data))
        self.num_questions += b'"request"' in data
        return Completed()


@pytest.mark.parametrize("has_left", [False, True])
def test_of_hundreds_that_begin_to_wait_together_few_ask(
    has_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do all that are left, when the host of the one that has asked is cut off."""
    clock, hosts, inboxes = Clock(monkeypatch), HOSTS[:128], list[Linked]()
    inboxes += [Linked(rank, inboxes) for rank in range(len(hosts))]
    watchdogs = [Watchdog(box, rank=i, hosts=hosts, limits=LIMITS) for i, box in enumerate(inboxes)]
    for watchdog in watchdogs:
        if has_left:
            watchdog.leave()
        watchdog.begin_wait("RS0")

    def count_questions(seconds: float, num_cut_off: int = 0) -> int:
        before = sum(inbox.num_questions for inbox in inboxes)
        for _ in range(round(4 * seconds)):
            clock.now_s += 0.25
            for watchdog in reversed(watchdogs[num_cut_off:]):
                watchdog.tend()
        return sum(inbox.num_questions for inbox in inboxes) - before

    size = len(hosts)
    assert count_questions(8.0) == (size - 1 if has_left else 2 * (size - 1))
    assert size - 1 <= count_questions(12.0, num_cut_off=8) <= 8 * 2 * (size - 1)


def test_a_thousand_questions_at_once_take_one_look_at_the_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that works on is asked by all that have ended, and must not fall behind."""
    looks: list[int] = []

    def look(thread: int) -> tuple[str, ...]:
        looks.append(thread)
        return ("train.py:1 <module>",)

    monkeypatch.setattr("dearmpi.comm.watchdog.watchdog.stack_of", look)
    inbox = Inbox(*((rank, QUESTION) for rank in range(1, 1000)))
    watchdog = Watchdog(inbox, rank=0, hosts=HOSTS[:1000], limits=LIMITS)
    watchdog.tend()
    assert inbox.sent == list(range(1, 1000)) and len(looks) == 1


def test_answers_do_not_look_at_source_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may lie on a disk that does not answer, which is what is to be told."""
    looked_at: list[object] = []
    monkeypatch.setattr("linecache.checkcache", looked_at.append)
    stack = Watchdog(Inbox(), rank=0, hosts=HOSTS[:1], limits=LIMITS).status().stack
    assert __file__ in stack[-1] and not looked_at
