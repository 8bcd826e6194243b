"""When fragments travel, and how buckets are dealt to them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dearmpi.errors import ConfigError
from dearmpi.plan.data.local_schedule import LocalSchedule, deal_runs
from tests.codes import raises


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 20))
def test_no_two_exchanges_are_under_way_at_once(every: int, fragments: int, delay: int) -> None:
    try:
        schedule = LocalSchedule(every, fragments, delay)
    except ConfigError:
        assert fragments > every or delay * fragments >= every
        return
    starts = [(step, schedule.starting(step)) for step in range(1, 3 * every + 1)]
    found = [(step, fragment) for step, fragment in starts if fragment is not None]
    for (one, _), (other, _) in zip(found, found[1:], strict=False):
        assert one + delay <= other
    for fragment in range(fragments):
        steps = [step for step, other in found if other == fragment]
        assert len(steps) in (3, 4) and all(
            other - one == every for one, other in zip(steps, steps[1:], strict=False)
        )


def test_the_longest_delay_is_accepted() -> None:
    for every in range(1, 40):
        for fragments in range(1, every + 1):
            most = LocalSchedule.most_delay(every, fragments)
            LocalSchedule(every, fragments, most)
            with raises(ConfigError, "settings-contradict", most + 1):
                LocalSchedule(every, fragments, most + 1)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ((0,), "out-of-range"),
        ((-3,), "out-of-range"),
        ((4, 0), "out-of-range"),
        ((4, 1, -1), "out-of-range"),
        ((4.0,), "wrong-type"),
        ((True,), "wrong-type"),
        ((4, 5), "settings-contradict"),
        ((4, 2, 2), "settings-contradict"),
    ],
)
def test_numbers_without_meaning_are_refused(settings: tuple[int, ...], code: str) -> None:
    with raises(ConfigError, code, settings[-1]):
        LocalSchedule(*settings)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 30))
def test_runs_hold_every_element_once(sizes: list[int], parts: int) -> None:
    if parts > len(sizes):
        with raises(ConfigError, "out-of-range", len(sizes), parts):
            deal_runs(sizes, parts)
        return
    runs = deal_runs(sizes, parts)
    assert len(runs) == parts and all(runs)
    assert [index for run in runs for index in run] == list(range(len(sizes)))


def test_equal_elements_are_dealt_evenly() -> None:
    assert [len(run) for run in deal_runs([5] * 24, 8)] == [3] * 8
