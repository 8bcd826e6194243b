"""Which gathers move into backprop: those of early layers first, in time that is idle."""

from __future__ import annotations

from dearmpi.plan.data.schedule import AllGather
from dearmpi.plan.search.problem import Buckets, interleave
from dearmpi.plan.simulate.flow import Load, WireDemand

SECOND = WireDemand(1.0, 1.0)


def buckets(*ready_s: float, update_s: float = 0.0, gather: WireDemand = SECOND) -> Buckets:
    """One per layer, first layer first, each reduced in a second."""
    count = len(ready_s)
    loads = tuple(Load(ready, SECOND, update_s, gather) for ready in ready_s)
    return Buckets(loads, tuple(range(count)), tuple(reversed(range(count))), ready_s[0])


def run(made: Buckets, *, released_s: float = 0.0, patience: float = 1.0) -> list[tuple[int, int]]:
    gathers = interleave(made, released_s=released_s, window=1, patience=patience)
    assert all(isinstance(gather, AllGather) for gather in gathers)
    return [(gather.bucket, gather.after) for gather in gathers]


def test_a_busy_wire_leaves_all_gathers_to_the_feed_forward() -> None:
    assert run(buckets(3, 2, 1)) == [(0, 0), (1, 0), (2, 0)]


def test_idle_time_goes_to_the_first_layers_that_are_reduced() -> None:
    # 3 is reduced at 2, 2 at 3; then the wire is idle until 5, and after RS1 until 8.
    assert run(buckets(8, 5, 2, 1)) == [(2, 2), (3, 2), (1, 1), (0, 0)]
    assert run(buckets(8, 5, 4, 1)) == [(3, 3), (1, 1), (2, 1), (0, 0)]


def test_a_gather_that_would_hold_up_a_reduce_scatter_waits_if_patient() -> None:
    tight = buckets(3.5, 1, 0)  # RS1 is over at 2; half of the next gather's time is left after it
    assert run(tight) == [(1, 1), (0, 0), (2, 0)]
    assert run(tight, patience=0.0) == [(1, 1), (2, 1), (0, 0)]
    assert run(tight, patience=0.5) == [(1, 1), (2, 1), (0, 0)]


def test_updates_come_before_gathers_one_after_the_other() -> None:
    assert run(buckets(6, 1, 0, update_s=2.0)) == [(2, 1), (1, 1), (0, 0)]


def test_nothing_is_gathered_before_it_is_released() -> None:
    assert run(buckets(8, 5, 2, 1), released_s=8.0) == [(0, 0), (1, 0), (2, 0), (3, 0)]
