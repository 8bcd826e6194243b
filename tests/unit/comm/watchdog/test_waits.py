"""What a report of a stall says of hundreds of ranks: no more than there is to know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest

from dearmpi.comm.watchdog.waits import StallReport, Status
from dearmpi.comm.watchdog.watchdog import StallLimits, Watchdog
from dearmpi.errors import StallError
from tests.codes import raises
from tests.unit.comm.inbox import Clock, Inbox

SIZE = 512
HOSTS = [f"n{rank // 8}" for rank in range(SIZE)]
WAITS = Status(
    backprops=6,
    steps=5,
    exchanges=0,
    waiting="RS0",
    waited_s=30.2,
    in_exchange=False,
    left=False,
    stack=("train.py:21 <module>",),
)
LOADS = replace(WAITS, backprops=5, waiting="", stack=("data.py:7 read",))


def test_ranks_that_do_the_same_at_the_same_place_are_one_line() -> None:
    statuses = {rank: replace(WAITS, waited_s=28.9 + rank / 400) for rank in range(SIZE)}
    statuses[511] = LOADS
    statuses[300] = replace(WAITS, stack=("train.py:22 <module>",))
    del statuses[7]
    assert StallReport(HOSTS, statuses, "is silent").lines() == [
        "  ranks 0-6, 8-299, 301-510 (64 hosts): each has begun 6 backprops, waits 29-30 s for RS0",
        "      train.py:21 <module>",
        "  rank 7 on n0: is silent",
        "  rank 300 on n37: has begun 6 backprops, waits 30 s for RS0",
        "      train.py:22 <module>",
        "  rank 511 on n63: has begun 5 backprops, does not wait for communication",
        "      data.py:7 read",
    ]


def test_a_wait_names_its_training_where_there_are_several() -> None:
    one = replace(WAITS, training="training in group 1", trainings={"training in group 1": (6, 5)})
    assert one.describe() == WAITS.describe()
    several = replace(one, trainings={**one.trainings, "training": (6, 5)})
    assert several.describe() == f"{WAITS.describe()} (training in group 1)"


def test_ranks_that_have_fallen_silent_are_told_apart_from_those_that_have_not() -> None:
    """A host that was cut off was doing what all others do."""
    statuses = dict.fromkeys(range(16), WAITS)
    silent_s = {rank: 50.0 + rank for rank in range(8, 16)}
    assert StallReport(HOSTS[:16], statuses, "is silent", silent_s).lines()[::2] == [
        "  ranks 0-7 (n0): each has begun 6 backprops, waits 30 s for RS0",
        "  ranks 8-15 (n1): each is silent; 58-65 s ago it has begun 6 backprops, waits 30 s for "
        "RS0",
    ]


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watchdog, Inbox, Clock]]:
    """Rank 9 of many, in a wait."""
    clock, inbox = Clock(monkeypatch), Inbox()
    limits = StallLimits(warning_s=5.0, abort_s=60.0)
    watchdog = Watchdog(inbox, rank=9, hosts=HOSTS, limits=limits)
    watchdog.begin_wait("RS0")
    yield watchdog, inbox, clock


def test_the_rank_that_asks_tells_of_hundreds_in_a_few_lines(
    waiting: tuple[Watchdog, Inbox, Clock],
) -> None:
    watchdog, inbox, clock = waiting
    with raises(StallError, "wait-timed-out") as caught:
        for half_second in range(200):
            clock.now_s += 0.5
            if half_second % 10 == 5:
                answer = {"status": asdict(WAITS), "to": max(1, half_second // 10)}
                data = json.dumps(answer).encode()
                inbox.messages += [(rank, data) for rank in range(SIZE) if rank not in (9, 77)]
            watchdog.tend()
            watchdog.check_wait()
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 9 on n1 gave up after waiting 60 s for RS0"
    silent = "does not answer (stopped, or its host is, or its world is closed)"
    assert f"  rank 77 on n9: {silent}" in lines
    assert len(lines) < 15, str(caught.value)


def test_a_rank_for_which_another_one_asks_names_that_one_and_tells_no_more(
    waiting: tuple[Watchdog, Inbox, Clock],
) -> None:
    """Hundreds that give up at once would each tell of hundreds; nor may it end the job first."""
    watchdog, inbox, clock = waiting
    began_s = clock.now_s
    with raises(StallError, "wait-timed-out") as caught:
        for half_second in range(200):
            clock.now_s += 0.5
            if half_second % 10 == 0:
                inbox.messages.append((3, b'{"request": 1}'))
            watchdog.tend()
            watchdog.check_wait()
    assert str(caught.value) == (
        "rank 9 on n1 gave up after waiting 64 s for RS0\n"
        "rank 3 on n0 polls all ranks and reports what they do"
    )
    assert 63.0 < clock.now_s - began_s < 66.0
