"""Waits in turn: three groups in a circle, ranks behind one, and those that wait for no circle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest

from dearmpi.comm.watchdog.chains import WaitChain, find_chain
from dearmpi.comm.watchdog.waits import Status
from dearmpi.comm.watchdog.watchdog import StallLimits, Watchdog
from dearmpi.errors import StallError
from tests.codes import raises
from tests.unit.comm.inbox import HOSTS, Clock, Inbox

COMPUTES = Status(
    backprops=0,
    steps=0,
    exchanges=5,
    waiting="",
    waited_s=0.0,
    in_exchange=False,
    left=False,
    stack=(),
)


def status(calls: Mapping[str, int], waits: str | None = None, **changes: Any) -> Status:
    """``calls``: begun, by group. ``waits``: in a call of this group; empty: of the job."""
    own = replace(COMPUTES, in_groups=calls, **changes)
    if waits is None:
        return own
    return replace(own, group=waits, waiting=f"a call of {waits}", in_exchange=True)


# Groups a of ranks 0, 1; b of 1, 2; c of 2, 0: each rank waits in another one.
RING = {
    0: status({"a": 1, "c": 0}, "a"),
    1: status({"a": 0, "b": 1}, "b"),
    2: status({"b": 0, "c": 1}, "c"),
}


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_circle_is_found_from_each_of_its_ranks(first: int) -> None:
    chain = find_chain(first, RING)
    assert chain is not None and chain.circle_at == 0
    assert chain.ranks == tuple((first + step) % 3 for step in range(3))
    told = chain.explain(RING)
    assert "3 ranks wait for each other in turn" in told
    assert all(f"rank {rank} has begun 0 backprops, waits" in told for rank in RING)


def test_whoever_waits_for_a_member_of_a_circle_waits_in_vain() -> None:
    outside = status({}, "", exchanges=6)
    chain = find_chain(3, {**RING, 3: outside})
    assert chain == WaitChain((3, 0, 1, 2), circle_at=1)
    assert "it waits for rank 0, and 3 ranks" in chain.explain({**RING, 3: outside})


def test_whoever_waits_for_a_rank_that_waits_for_one_that_has_ended_is_told_its_status() -> None:
    statuses = {
        0: status({"a": 1}, "a"),
        1: status({"a": 0, "b": 1}, "b"),
        2: status({"b": 0}, left=True, exit_status=3),
    }
    chain = find_chain(0, statuses)
    assert chain == WaitChain((0, 1, 2))
    assert "rank 1, which waits for rank 2, which has ended with exit status 3" in chain.explain(
        statuses
    )


@pytest.mark.parametrize(
    "changed",
    [
        {2: status({"b": 0, "c": 0})},  # it computes, and may yet come
        {2: status({"b": 1, "c": 0}, "b")},  # it has come to b
        {},
    ],
)
def test_ranks_that_can_go_on_are_let_wait(changed: dict[int, Status]) -> None:
    statuses = {**RING, **changed}
    if not changed:
        del statuses[2]  # it has not answered
    assert find_chain(0, statuses) is None


def test_the_rank_that_polls_ends_a_circle_long_before_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that it is no member of."""
    clock, inbox = Clock(monkeypatch), Inbox()
    limits = StallLimits(warning_s=5.0, abort_s=600.0)
    watchdog = Watchdog(inbox, rank=0, hosts=HOSTS[:4], limits=limits)
    began_s = clock.now_s

    def wait() -> None:
        with watchdog.exchange():
            watchdog.begin_wait("world.barrier()")
            for _ in range(40):
                clock.now_s += 0.5
                if inbox.sent:
                    inbox.sent.clear()
                    for rank, one in RING.items():
                        other = replace(one, exchanges=0)
                        answer = json.dumps({"status": asdict(other), "to": 1}).encode()
                        inbox.messages.append((rank + 1, answer))
                watchdog.tend()
                watchdog.check_wait()

    told = ("it waits for rank 1, and 3 ranks wait for each other", "on all groups in one order")
    with raises(StallError, "ranks-out-of-step", *told):
        wait()
    assert clock.now_s - began_s < 5.0
