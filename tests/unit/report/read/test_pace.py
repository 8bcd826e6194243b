"""Which rank holds the others up, and for how long."""

from __future__ import annotations

import time
from collections.abc import Collection

import pytest

from dearmpi.report.read.pace import (
    STEADY,
    STRETCH_STEPS,
    WORTH,
    SlowRanks,
    Stragglers,
    find_stragglers,
    name_ranks,
)


def find(*ranks: tuple[float, float]) -> Stragglers | None:
    """From (busy_s, wait_s) of each rank."""
    step_s = max((sum(rank) for rank in ranks), default=0.0)
    return find_stragglers([busy for busy, _ in ranks], [wait for _, wait in ranks], step_s=step_s)


def test_the_rank_for_which_the_others_wait_is_found() -> None:
    found = find((0.1, 0.15), (0.11, 0.14), (0.25, 0.0), (0.1, 0.15))
    assert found is not None and found.places == (2,)
    assert (found.busy_s, found.typical_s) == pytest.approx((0.25, 0.1))
    assert (found.waited_s, found.excess_s) == pytest.approx((0.15, 0.15))


def test_ranks_that_are_slow_alike_are_found_together() -> None:
    noise = (0.000, 0.002, -0.001, 0.001)
    busy_s = [0.1 + 0.1 * (rank > 3) + noise[rank % 4] for rank in range(8)]
    found = find(*((own_s, 0.202 - own_s) for own_s in busy_s))
    assert found is not None and found.places == (4, 5, 6, 7)
    assert found.excess_s == pytest.approx(0.1)


def test_a_rank_halfway_to_the_slowest_is_not_as_slow() -> None:
    found = find((0.1, 0.1), (0.1, 0.1), (0.15, 0.05), (0.2, 0.0))
    assert found is not None and found.places == (3,)


@pytest.mark.parametrize(
    "ranks",
    [
        [(0.5, 0.0)],
        [(0.1, 0.01), (0.11, 0.0)],  # no two machines are alike
        [(0.1, 0.0), (0.3, 0.0)],  # nobody waits for it
        [(0.1, 0.4), (0.2, 0.4)],  # it waits for the network as long as the others
        [(0.1, 0.2), (0.3, 0.0), (0.3, 0.0)],  # one is fast
        [(0.0, 0.0), (0.0, 0.0)],
        [],
    ],
)
def test_differences_that_harm_nobody_are_not_told(ranks: list[tuple[float, float]]) -> None:
    assert find(*ranks) is None


@pytest.mark.parametrize(("more", "is_slow"), [(-0.01, False), (0.01, True)])
def test_it_must_cost_a_share_of_a_step(more: float, is_slow: bool) -> None:
    excess_s = WORTH + more
    assert (find((1.0 - excess_s, excess_s), (1.0, 0.0)) is not None) is is_slow


@pytest.mark.parametrize("num_slow", [0, 1, 5_000, 10_000])
def test_many_ranks_are_looked_through_in_no_time(num_slow: int) -> None:
    busy_s = [1.0] * num_slow + [0.5] * (20_000 - num_slow)
    begun_s = time.process_time()
    found = find_stragglers(busy_s, [1.0 - own_s for own_s in busy_s], step_s=1.0)
    assert time.process_time() - begun_s < 0.5
    assert (0 if found is None else len(found.places)) == num_slow


def follow(
    *places: int | Collection[int] | None, num_steps: int = STRETCH_STEPS, num_ranks: int = 2
) -> SlowRanks:
    """After rows of ``num_steps`` in which the rank or ranks at each of ``places`` were slow."""
    slow_ranks = SlowRanks(100)
    for row, slow in enumerate(places, 1):
        those = slow if isinstance(slow, Collection) else (slow,)
        busy_s = [1.0 if rank in those else 0.5 for rank in range(num_ranks)]
        slow_ranks.add(100 + num_steps * row, busy_s, [1.0 - own_s for own_s in busy_s])
    return slow_ranks


def test_a_rank_is_named_once_it_was_slow_for_a_while() -> None:
    assert follow(*[1] * (STEADY - 1)).steady is None
    found = follow(0, *[1] * STEADY).steady
    assert found is not None and found.places == (1,) and found.excess_s == pytest.approx(0.5)


@pytest.mark.parametrize("places", [(0, 1) * STEADY, (1, 1, None) * STEADY, (0, 0, 0, 1) * STEADY])
def test_ranks_that_are_late_in_turn_are_not_named(places: tuple[int | None, ...]) -> None:
    assert follow(*places).steady is None


def test_all_ranks_of_a_slow_host_are_named() -> None:
    """They are slow together, and which of them is the slowest is chance."""
    late = [(2, 3), (1, 2, 3), (2, 3), (0, 2, 3), (2, 3)]
    found = follow(*late, num_ranks=6).steady
    assert found is not None and found.places == (2, 3)
    assert (found.busy_s, found.typical_s, found.waited_s) == (1.0, 0.5, 0.5)
    assert follow(*late, num_ranks=6).share(2) == 1.0


def test_what_is_told_of_slow_ranks_is_of_those_that_are_named() -> None:
    found = find_stragglers([0.5, 0.5, 0.86, 0.98, 0.5], [0.5, 0.5, 0.14, 0.02, 0.5], step_s=1.0)
    assert found is not None and found.places == (2, 3)
    named = found.only([2])
    assert named is not None and (named.places, named.busy_s) == ((2,), 0.86)
    assert named.waited_s == pytest.approx(0.36)
    assert found.only([0]) is None


def test_rows_of_few_steps_count_together() -> None:
    few = STRETCH_STEPS // 5
    assert follow(*[1] * STEADY, num_steps=few).steady is None
    assert follow(*[1] * 5 * STEADY, num_steps=few).steady is not None
    assert follow(*[0, 1] * 5 * STEADY, num_steps=few).steady is None  # as busy on the whole


def test_a_rank_has_recovered_once_it_was_not_slow_for_as_long() -> None:
    slow = [1] * STEADY
    assert not follow(*slow, *[None] * (STEADY - 1)).has_recovered(1)
    assert follow(*slow, *[None] * STEADY).has_recovered(1)


def test_the_share_of_a_run_in_which_a_rank_was_slow() -> None:
    assert follow(*[1] * 2 * STEADY, *[0, None] * STEADY).share(1) == 0.5
    assert SlowRanks(0).share(1) == 1.0


@pytest.mark.parametrize(
    ("hosts", "name"),
    [
        ({3: "n1"}, "rank 3 on n1"),
        ({3: ""}, "rank 3"),
        ({2: "n1", 5: "n1"}, "ranks 2 and 5 on n1"),
        ({1: "n0", 2: "n0", 5: "n1"}, "ranks 1, 2 and 5 on n0, n1"),
        (dict.fromkeys(range(8, 16), "n1"), "ranks 8 to 15 on n1"),
        ({rank: f"n{rank}" for rank in range(0, 40, 2)}, "20 ranks, 0 to 38, on 20 hosts"),
    ],
)
def test_ranks_are_named_in_few_words(hosts: dict[int, str], name: str) -> None:
    assert name_ranks(hosts) == name
