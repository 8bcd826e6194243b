"""Schedules, pinned by their pictures. B: backprop, F: feed-forward, |: the end of backprop."""

from __future__ import annotations

from textwrap import dedent

import pytest

from dearmpi.config import Gather, ScheduleName
from dearmpi.errors import ConfigError
from dearmpi.plan.data.schedule import (
    AllGather,
    Conduct,
    Launch,
    Schedule,
    Stage,
    Wait,
    build_schedule,
)
from tests.codes import raises

SEQUENCES: list[tuple[ScheduleName, int, str]] = [
    ("serial", 1, "| RS0 AG0"),
    ("serial", 3, "| RS2 AG2 RS1 AG1 RS0 AG0"),
    ("serial", 4, "| RS3 AG3 RS2 AG2 RS1 AG1 RS0 AG0"),
    ("wfbp", 1, "| RS0 AG0"),
    ("wfbp", 3, "RS2 AG2 | RS1 AG1 RS0 AG0"),
    ("wfbp", 4, "RS3 AG3 RS2 | AG2 RS1 AG1 RS0 AG0"),
    ("dear", 1, "| RS0 AG0"),
    ("dear", 3, "RS2 RS1 | RS0 AG0 AG1 AG2"),
    ("dear", 4, "RS3 RS2 RS1 | RS0 AG0 AG1 AG2 AG3"),
]

PICTURES: dict[tuple[ScheduleName, int], str] = {
    ("serial", 1): """
        compute  B0  |         F0
        network      | RS0 AG0
        """,
    ("serial", 3): """
        compute  B2  B1  B0  |                         F0  F1  F2
        network              | RS2 AG2 RS1 AG1 RS0 AG0
        """,
    ("serial", 4): """
        compute  B3  B2  B1  B0  |                                 F0  F1  F2  F3
        network                  | RS3 AG3 RS2 AG2 RS1 AG1 RS0 AG0
        """,
    ("wfbp", 1): """
        compute  B0  |         F0
        network      | RS0 AG0
        """,
    ("wfbp", 3): """
        compute  B2  B1  B0  |                 F0  F1  F2
        network      RS2 AG2 | RS1 AG1 RS0 AG0
        """,
    ("wfbp", 4): """
        compute  B3  B2  B1  B0  |                     F0  F1  F2  F3
        network      RS3 AG3 RS2 | AG2 RS1 AG1 RS0 AG0
        """,
    ("dear", 1): """
        compute  B0  |         F0
        network      | RS0 AG0
        """,
    ("dear", 3): """
        compute  B2  B1  B0  |         F0  F1  F2
        network      RS2 RS1 | RS0 AG0 AG1 AG2
        """,
    ("dear", 4): """
        compute  B3  B2  B1  B0  |         F0  F1  F2  F3
        network      RS3 RS2 RS1 | RS0 AG0 AG1 AG2 AG3
        """,
}


def schedule(
    reduce_scatters: tuple[int, ...], *all_gathers: tuple[int, int], wait: Wait = Wait.FEED_FORWARD
) -> Schedule:
    gathers = tuple(AllGather(bucket, after) for bucket, after in all_gathers)
    return Schedule("own", reduce_scatters, gathers, Launch.GRADIENTS_READY, wait)


@pytest.mark.parametrize(("name", "num_buckets", "sequence"), SEQUENCES)
def test_sequence(name: ScheduleName, num_buckets: int, sequence: str) -> None:
    assert build_schedule(name, num_buckets).sequence() == sequence


@pytest.mark.parametrize(("name", "num_buckets"), PICTURES)
def test_picture(name: ScheduleName, num_buckets: int) -> None:
    picture = dedent(PICTURES[name, num_buckets]).strip()
    assert build_schedule(name, num_buckets).render() == picture


@pytest.mark.parametrize("name", ["serial", "wfbp"])
def test_the_baselines_reduce_and_gather_bucket_by_bucket(name: ScheduleName) -> None:
    plan = build_schedule(name, 3)
    assert plan.reduce_scatters == (2, 1, 0)
    assert plan.all_gathers == (AllGather(2, 2), AllGather(1, 1), AllGather(0, 0))
    assert plan.wait is Wait.STEP


def test_dear_gathers_nothing_before_the_last_reduce_scatter() -> None:
    plan = build_schedule("dear", 3)
    assert plan.reduce_scatters == (2, 1, 0)
    assert plan.all_gathers == (AllGather(0, 0), AllGather(1, 0), AllGather(2, 0))
    assert plan.wait is Wait.FEED_FORWARD


def test_when_reduce_scatters_are_launched() -> None:
    assert build_schedule("serial", 2).launch is Launch.BACKPROP_END
    assert build_schedule("wfbp", 2).launch is Launch.GRADIENTS_READY
    assert build_schedule("dear", 2).launch is Launch.GRADIENTS_READY


def test_a_gather_moved_into_backprop_is_drawn_there() -> None:
    plan = schedule((2, 1, 0), (2, 2), (0, 0), (1, 0))
    picture = """
        compute  B2  B1  B0  |             F0  F1  F2
        network      RS2 AG2 | RS1 RS0 AG0 AG1
        """
    assert plan.render() == dedent(picture).strip()
    assert plan.sequence() == "RS2 AG2 | RS1 RS0 AG0 AG1"


def test_a_gather_waits_for_the_operation_it_is_tied_to() -> None:
    tied = schedule((2, 1, 0), (2, 1), (0, 0), (1, 0))
    assert tied.sequence() == "RS2 RS1 | AG2 RS0 AG0 AG1"


def test_columns_are_as_wide_as_the_longest_label() -> None:
    compute, network = build_schedule("dear", 11).render().splitlines()
    assert compute.index("B9") == network.index("RS10")
    assert network.endswith("RS0  AG0  AG1  AG2  AG3  AG4  AG5  AG6  AG7  AG8  AG9  AG10")


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (((1, 1), (0, 0), (1, 1)), ("[1, 1]",)),
        (((1, 0), (0, 0)), ("[0]",)),
        (((1, 0), (0, 0), (1, 1), (2, 1)), ("[0, 1, 2]",)),
        (((1, 0), (0, 0), (0, 0), (1, 1)), ()),
        (((1, 0), (0, 7), (1, 1)), ("0", "7", "2")),
    ],
)
def test_bad_schedules_are_refused(bad: tuple[tuple[int, ...], ...], told: tuple[str, ...]) -> None:
    reduce_scatters, *gathers = bad
    pairs = [(bucket, after) for bucket, after in gathers]
    with raises(ConfigError, "plan-inconsistent", *told):
        schedule(reduce_scatters, *pairs)


@pytest.mark.parametrize(
    ("schedule", "gather", "order", "before_step"),
    [
        ("dear", "parameters", "reduce transform update gather", "reduce"),
        ("wfbp", "parameters", "reduce transform update gather", "reduce"),
        ("dear", "gradients", "reduce transform gather update", "reduce"),
        ("wfbp", "gradients", "reduce transform gather update", "gather"),
    ],
)
def test_what_is_gathered_orders_a_buckets_stages(
    schedule: ScheduleName, gather: Gather, order: str, before_step: str
) -> None:
    """``before_step``: the stage that a bucket reaches before the step gives its options."""
    conduct = Conduct(build_schedule(schedule, 2), window=1, eager=False, gather=gather)
    assert conduct.stages == tuple(Stage[name.upper()] for name in order.split())
    assert conduct.last_before_step is Stage[before_step.upper()]
    last, one_before = conduct.stages[-1], conduct.stages[-2]
    assert conduct.stage_before(last) is one_before
    assert conduct.stage_before(one_before) is Stage.REDUCE
