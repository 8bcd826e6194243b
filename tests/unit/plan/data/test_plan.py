"""Plans: through a file and back, laid out over the model they are for, refused for any other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.data.plan import Plan, Prediction, fingerprint, read_plan
from dearmpi.plan.data.schedule import AllGather, Launch, Schedule, Wait, dear
from tests.codes import raises

HALF = ParamSpec("h", (2,), itemsize=2, dtype="bfloat16")
SPECS = [ParamSpec("a", (2,)), HALF, ParamSpec("b", (3,)), ParamSpec("c", (4,))]
SCHEDULE = Schedule(
    "own",
    (2, 1, 0),
    (AllGather(2, 1), AllGather(0, 0), AllGather(1, 0)),
    Launch.GRADIENTS_READY,
    Wait.FEED_FORWARD,
)
PLAN = Plan(
    parameters=("a", "h", "b", "c"),
    buckets=(("a", "b"), ("h",), ("c",)),
    schedule=SCHEDULE,
    window=3,
    eager=True,
    world_size=4,
    fingerprint=fingerprint(SPECS),
    prediction=Prediction(1.5, 1.0, 0.75, 1.25),
    origin="by hand",
)


def changed(**changes: Any) -> str:
    """The plan's file with keys changed; None takes one away."""
    data = {**json.loads(PLAN.to_json()), **changes}
    return json.dumps({key: value for key, value in data.items() if value is not None})


def test_a_file_gives_back_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json())
    assert read_plan(path) == PLAN


def test_the_layout_is_the_plans_whatever_the_order_of_the_model() -> None:
    for specs in (SPECS, SPECS[::-1]):
        layout = PLAN.layout(specs, 4)
        assert [bucket.names for bucket in layout] == [("a", "b"), ("h",), ("c",)]
        assert layout.world_size == 4


def test_a_description_has_what_matters() -> None:
    text = PLAN.describe()
    assert "own, 3 buckets, world size 4, 3 in flight; by hand" in text
    assert "iteration 1.5000 s" in text and "below 1.2500 s" in text
    assert "gathers before the last reduce-scatter: 1" in text
    assert "RS2 RS1 | AG2 RS0 AG0 AG1" in text


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (changed(format=2, version="9.1"), ("other-format-version", "2", "9.1", "1")),
        (changed(format=None), ("malformed-file", "format is")),
        (changed(buckets=[["a", "b"], ["h"]]), ("plan-inconsistent", "4")),
        (changed(buckets=[["a", "b"], ["h"], ["c", "a"]]), ("plan-inconsistent", "2")),
        (changed(buckets=[["a", "b"], ["h"], ["c", "x"]]), ("plan-inconsistent", "1")),
        (changed(parameters=["a", "h", "b", "c", "c"]), ("plan-inconsistent",)),
        (changed(buckets=[["a", "b", "h", "c"]]), ("plan-inconsistent", "1", "3")),
        (changed(buckets=["a", ["b", "h", "c"]]), ("malformed-file", "buckets is", "'a'")),
        (changed(buckets=[[1], ["b", "h", "c"]]), ("malformed-file", "1")),
        (changed(world_size=0), ("malformed-file", "world_size is", "0")),
        (changed(window=True), ("malformed-file", "window is")),
        (changed(gather="weights"), ("unknown-choice", "gather is", "'weights'")),
        (changed(eager="yes"), ("malformed-file", "eager is", "'yes'")),
        (changed(schedule={}), ("malformed-file", "name is")),
        (changed(prediction={"iteration_s": -1}), ("malformed-file", "iteration_s is", "-1")),
        (changed(idle=[7]), ("plan-inconsistent", "[7]", "7", "3")),
        (changed(idle=[-1]), ("plan-inconsistent", "-1")),
        (changed(idle=[0, 0]), ("plan-inconsistent", "0")),
        ("not json", ("malformed-file", "plan.json is")),
    ],
)
def test_a_wrong_file_is_refused(text: str, refused: tuple[str, ...]) -> None:
    with raises(ConfigError, *refused) as error:
        Plan.from_json(text, "plan.json")
    assert str(error.value).startswith("plan.json")


@pytest.mark.parametrize(
    ("key", "value", "refused"),
    [
        ("launch", "soon", ("malformed-file", "launch is", "'soon'")),
        ("wait", "never", ("malformed-file", "wait is", "'never'")),
        ("reduce_scatters", [2, 1, 1], ("plan-inconsistent",)),
        ("reduce_scatters", ["2"], ("malformed-file",)),
        ("all_gathers", [[2, 1], [0, 0], [1]], ("malformed-file", "[bucket, after]")),
        ("all_gathers", [[2, 1], [0, 0], [1, 9]], ("plan-inconsistent", "reduce-scatter", "9")),
    ],
)
def test_a_wrong_schedule_is_refused(key: str, value: Any, refused: tuple[str, ...]) -> None:
    schedule = {**json.loads(PLAN.to_json())["schedule"], key: value}
    with raises(ConfigError, *refused):
        Plan.from_json(changed(schedule=schedule), "plan.json")


def test_another_world_size_is_refused() -> None:
    with raises(ConfigError, "plan-of-other-model", 4, 3):
        PLAN.layout(SPECS, 3)


@pytest.mark.parametrize(
    ("specs", "told"),
    [
        (SPECS[1:], ("4", "3")),
        ([*SPECS, ParamSpec("d", (1,))], ("4", "5")),
        ([*SPECS[:-1], ParamSpec("c", (5,))], ()),
        ([*SPECS[:-1], ParamSpec("c", (4,), itemsize=8, dtype="float64")], ()),
    ],
)
def test_another_model_is_refused(specs: list[ParamSpec], told: tuple[str, ...]) -> None:
    with raises(ConfigError, "plan-of-other-model", *told):
        PLAN.layout(specs, 4)


def test_a_bucket_with_a_gap_is_refused() -> None:
    gap = replace(PLAN, buckets=(("a", "c"), ("h",), ("b",)))
    with raises(ConfigError, "plan-inconsistent", 0):
        gap.layout(SPECS, 4)


def test_the_fingerprint_is_of_names_shapes_and_dtypes_in_any_order() -> None:
    assert fingerprint(SPECS) == fingerprint(reversed(SPECS))
    other = [replace(SPECS[0], shape=(1, 2)), *SPECS[1:]]
    assert fingerprint(SPECS) != fingerprint(other)


def test_a_plan_of_a_named_schedule_is_read_back() -> None:
    plan = replace(PLAN, schedule=dear(3))
    assert Plan.from_json(plan.to_json()).schedule == dear(3)


def test_a_gather_behind_a_late_one_is_late_too() -> None:
    gathers = (AllGather(1, after=0), AllGather(0, after=0), AllGather(2, after=2))
    schedule = Schedule("own", (2, 1, 0), gathers, Launch.GRADIENTS_READY, Wait.FEED_FORWARD)
    assert replace(PLAN, schedule=schedule).num_early_gathers == 0
    early = replace(schedule, all_gathers=(gathers[2], *gathers[:2]))
    assert replace(PLAN, schedule=early).num_early_gathers == 1


def test_buckets_of_frozen_parameters_are_not_among_those_that_travel() -> None:
    text = replace(PLAN, idle=(1,)).describe()
    assert "own, 2 buckets and 1 of frozen parameters, world size 4" in text
    assert "RS1" not in text and "AG1" not in text and "RS2" in text
