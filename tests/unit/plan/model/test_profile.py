"""Profiles: a workload with times, through a file and back, and files that are wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.data.workload import (
    LayerSpec,
    Workload,
    float_layer,
    read_workload,
    workload_names,
)
from dearmpi.plan.model.profile import (
    LayerTimes,
    ModelProfile,
    parse_profile,
    profile_workload,
    read_profile,
)
from tests.codes import raises

HALF = ParamSpec("head.weight", (3, 2), itemsize=2, dtype="bfloat16", device="cuda:0")
FROZEN = ParamSpec("scale", (1,), trained=False)  # of the model itself, whose name is empty
WORKLOAD = Workload(
    "small",
    "made up",
    (
        float_layer("embedding", {"weight": (5, 2)}, 0),
        LayerSpec("", (FROZEN,)),
        LayerSpec("head", (HALF,), 3, uses=("embedding.weight",)),
    ),
    batch_size=8,
    unit="seq",
)
TIMES = (LayerTimes(0.1, 0.2), LayerTimes(0.0, 0.0), LayerTimes(0.3, 0.4))
PROFILE = ModelProfile(WORKLOAD, TIMES, device="one GPU", world_size=4, version="7")


WITHOUT_PARAMETERS = """{"name": "x", "source": "", "batch_size": 1, "layers": [
{"name": "a", "params": []}, {"name": "b", "params": []}]}"""


def changed(**changes: Any) -> str:
    """The profile's file with its last layer changed; None takes a key away."""
    data = json.loads(PROFILE.to_json())
    layer = {**data["layers"][-1], **changes}
    data["layers"][-1] = {key: value for key, value in layer.items() if value is not None}
    return json.dumps(data)


def test_a_file_gives_back_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.to_json())
    assert read_profile(path) == PROFILE


@pytest.mark.parametrize("name", workload_names())
def test_a_workload_shares_its_times_by_flops(name: str) -> None:
    profile = profile_workload(read_workload(name), feed_forward_s=1.0, backprop_s=2.0)
    assert profile.feed_forward_s == pytest.approx(1.0)
    assert profile.backprop_s == pytest.approx(2.0)
    assert [t.feed_forward_s for t in profile.times] == profile.workload.shares()
    assert parse_profile(profile.to_json(), "here") == profile


def test_what_each_layer_computes_with_is_known() -> None:
    assert [layer.used for layer in WORKLOAD.layers] == [
        ("embedding.weight",),
        ("scale",),
        ("head.weight", "embedding.weight"),
    ]
    assert [spec.name for spec in WORKLOAD.params()] == ["embedding.weight", "scale", "head.weight"]


def test_a_shorter_backprop_keeps_its_proportions() -> None:
    shorter = PROFILE.with_shorter_backprop(0.15)
    assert [times.backprop_s for times in shorter.times] == pytest.approx([0.15, 0.0, 0.3])
    assert shorter.feed_forward_s == PROFILE.feed_forward_s
    assert PROFILE.with_shorter_backprop(9.0).backprop_s == pytest.approx(0.3)  # half is left
    idle = ModelProfile(WORKLOAD, (LayerTimes(0.1, 0.0),) * 3)
    assert idle.with_shorter_backprop(0.1) == idle


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (changed(backprop_s=None), ("malformed-file", "backprop_s is")),
        (changed(backprop_s=-1), ("malformed-file", "backprop_s is", "-1")),
        (changed(backprop_s=math.nan), ("malformed-file", "backprop_s is")),
        (changed(feed_forward_s=math.inf), ("malformed-file", "feed_forward_s is")),
        (changed(feed_forward_s="1"), ("malformed-file", "feed_forward_s is", "'1'")),
        (changed(name="embedding"), ("profile-inconsistent", "2")),
        (changed(name="", params=[["scale", [2]]]), ("profile-inconsistent", "2")),
        (
            changed(params=[["weight", [2]], ["weight", [3]]]),
            ("profile-inconsistent", "head.weight", "2"),
        ),
        (changed(params=[["weight", "2"]]), ("malformed-file", "layers[2]", "[name, shape]")),
        (
            changed(params=[["weight", [2], {"itemsize": 0}]]),
            ("malformed-file", "itemsize is", "0"),
        ),
        (changed(params=[["weight", [10**400]]]), ("profile-inconsistent",)),
        (changed(params=[["weight", [True, 8]]]), ("malformed-file", "layers[2]", "[name, shape]")),
        (changed(params=[["weight", [2**50], {"itemsize": 16}]]), ("profile-inconsistent", "16")),
        (changed(uses=["lost"]), ("profile-inconsistent",)),
        (changed(uses="lost"), ("malformed-file", "uses is", "'lost'")),
        ('{"format": 2, "version": "9.1", "layers": []}', ("other-format-version", "2", "9.1")),
        (WITHOUT_PARAMETERS, ("profile-inconsistent", "no parameter")),
        ("{}", ("file-of-other-kind", "no layers", "give a profile")),
        ("[]", ("malformed-file",)),
        ("{", ("malformed-file", "profile.json is")),
    ],
)
def test_a_wrong_file_is_refused(text: str, refused: tuple[str, ...]) -> None:
    with raises(ConfigError, *refused):
        parse_profile(text, "profile.json")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with raises(ConfigError, "unreadable-file", "lost.json"):
        read_profile(tmp_path / "lost.json")


def test_wrong_times_are_refused_where_no_file_is_read() -> None:
    with raises(ConfigError, "profile-inconsistent", 3, 1):
        ModelProfile(WORKLOAD, TIMES[:1])
    with raises(ConfigError, "out-of-range", "feed_forward_s is"):
        ModelProfile(WORKLOAD, (LayerTimes(math.nan, 0), *TIMES[1:]))
