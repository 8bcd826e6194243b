from __future__ import annotations

import math

import pytest

from dearmpi.plan.simulate.flow import Flight, Wire, WireDemand

LARGE = WireDemand(alone_s=12.0, wire_s=9.0, num_rounds=3)  # messages of 3 s, a pause of 1 s
SMALL = WireDemand(alone_s=0.9, wire_s=0.3, num_rounds=3)  # of 0.1 s and 0.2 s
BUSY = WireDemand(alone_s=9.0, wire_s=9.0, num_rounds=3)  # never pauses


def send(*posts: tuple[float, WireDemand], gathers: int | None = None) -> list[float]:
    """When each of what is posted at given times is complete; number ``gathers`` is a gather."""
    wire, waiting = Wire(), [*enumerate(posts)]
    arrivals: dict[int, float] = {}
    while waiting or len(wire):
        now, landed = wire.advance(waiting[0][1][0] if waiting else math.inf)
        arrivals |= {flight.bucket: now for flight in landed}
        while waiting and waiting[0][1][0] <= now:
            number, (at, transfer) = waiting.pop(0)
            wire.post(Flight(number, transfer, reduces=number != gathers, now=at), at)
    return [arrivals[number] for number in range(len(posts))]


def test_alone_it_takes_what_it_takes_alone() -> None:
    assert send((2.0, LARGE)) == [pytest.approx(14.0)]


def test_a_small_one_waits_for_the_message_that_is_on_the_wire() -> None:
    # It gets through all its rounds while the large one pauses.
    assert send((0.0, LARGE), (1.0, SMALL)) == [pytest.approx(12.0), pytest.approx(3.9)]


def test_a_small_one_waits_in_every_round_where_there_is_no_pause() -> None:
    assert send((0.0, BUSY), (1.0, SMALL)) == [pytest.approx(9.2), pytest.approx(9.5)]


def test_two_alike_fill_each_others_pauses() -> None:
    assert send((0.0, LARGE), (0.0, LARGE)) == [pytest.approx(16.0), pytest.approx(19.0)]


def test_a_reduce_scatter_does_not_wait_for_the_message_of_a_gather() -> None:
    # All its rounds take 0.9 s, and the gather has the wire back whenever it pauses.
    assert send((0.0, BUSY), (1.0, SMALL), gathers=0) == [pytest.approx(9.3), pytest.approx(1.9)]


def test_what_costs_nothing_waits_for_nothing() -> None:
    """As a gather that stands for the second half of an all-reduce."""
    free = WireDemand(alone_s=0.0, wire_s=0.0, num_rounds=1)
    assert send((0.0, BUSY), (1.0, free), gathers=1) == [pytest.approx(9.0), pytest.approx(1.0)]


def test_a_gather_waits_for_the_message_of_a_reduce_scatter() -> None:
    assert send((0.0, BUSY), (1.0, SMALL), gathers=1) == [pytest.approx(9.0), pytest.approx(9.9)]
