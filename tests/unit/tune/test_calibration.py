from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dearmpi.config import EngineConfig
from dearmpi.errors import ConfigError
from dearmpi.plan.model.codec_cost import CodecCost
from dearmpi.tune.calibrate import Crossed, wire_pace
from dearmpi.tune.calibration import (
    Calibration,
    DimensionTimes,
    GridTimes,
    SizeTimes,
    parse_calibration,
    read_calibration,
)
from tests.codes import raises

ALPHA_S, BETA = 1e-3, 8e-9


def exact(alpha_s: float, beta: float) -> tuple[SizeTimes, ...]:
    """What a link without any noise gives, which is busy all the time."""
    return tuple(
        SizeTimes(n, alpha_s + beta * n, max(alpha_s + beta * n, 2 * beta * n))
        for n in (2**14, 2**17, 2**20)
    )


def made(**changes: Any) -> Calibration:
    whole = Calibration(
        hosts=("n0", "n0", "n1"),
        library="MPICH 5.0.2",
        algorithm="ring",
        reduce_scatter=exact(ALPHA_S, BETA),
        all_gather=exact(2 * ALPHA_S, BETA / 2),
    )
    return replace(whole, **changes)


def test_the_costs_are_fitted() -> None:
    costs = made(update_s=1e-4, update_s_per_byte=1e-10, main_thread_s=1e-5).costs
    assert costs.world_size == 3
    assert costs.reduce_scatter.alpha_s == pytest.approx(ALPHA_S)
    assert costs.reduce_scatter.beta_s_per_byte == pytest.approx(BETA)
    assert costs.all_gather.alpha_s == pytest.approx(2 * ALPHA_S)
    assert costs.all_gather.beta_s_per_byte == pytest.approx(BETA / 2)
    assert (costs.update_s, costs.update_s_per_byte, costs.main_thread_s) == (1e-4, 1e-10, 1e-5)
    assert made().fits[0].relative_error < 1e-9


def test_a_file_tells_all_that_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    path.write_text(made(update_s=1e-4).to_json())
    assert read_calibration(path) == made(update_s=1e-4)
    plain = json.loads(path.read_text())
    assert plain["reduce_scatter"]["beta_s_per_byte"] == pytest.approx(BETA)
    assert plain["reduce_scatter"]["relative_error"] < 1e-9
    assert plain["hosts"] == ["n0", "n0", "n1"] and plain["library"] == "MPICH 5.0.2"


def test_what_dimensions_cost_is_kept(tmp_path: Path) -> None:
    """The inner one is ten times as fast: most of a bucket stays where it is cheap."""
    inner = DimensionTimes(2, exact(1e-5, BETA / 10), exact(1e-5, BETA / 10))
    outer = DimensionTimes(2, exact(ALPHA_S, BETA), exact(ALPHA_S, BETA))
    whole = made(hosts=("n0", "n0", "n1", "n1"), grid=GridTimes("2x2", (inner, outer), 1.0))
    path = tmp_path / "link.json"
    path.write_text(whole.to_json())
    assert read_calibration(path) == whole
    assert made().grid_costs is None
    assert whole.grid is not None and whole.grid.rates == (10.0, 1.0)
    assert list(whole.grid.costs_by_topology(whole.costs)) == ["2x2", "2x2/10x1"]
    costs = whole.grid_costs
    assert costs is not None and costs.world_size == 4
    assert costs.reduce_scatter.alpha_s == pytest.approx(1e-5 + ALPHA_S)
    assert costs.reduce_scatter.beta_s_per_byte == pytest.approx(BETA / 2 + BETA / 40)


CODEC = CodecCost("topk", 0.02, 0.252, 1e-9, 2e-9, density=0.01)


@pytest.mark.parametrize("codec", [CODEC, CodecCost("int8", 0.252, 0.252)])
def test_what_compression_costs_is_kept(tmp_path: Path, codec: CodecCost) -> None:
    path = tmp_path / "link.json"
    path.write_text(made(codec=codec).to_json())
    found = read_calibration(path)
    assert found == made(codec=codec) and found.costs == made().costs
    config = EngineConfig(compress=codec.compress, density=codec.density)  # type: ignore[arg-type]
    assert found.codec_for(config, "link") == codec
    assert found.codec_for(EngineConfig(), "link") is None
    for other in (EngineConfig(compress="int4"), EngineConfig(compress="topk", density=0.1)):
        with raises(ConfigError, "setting-missing", "link has", f"--compress {other.compress}"):
            found.codec_for(other, "link")
    with raises(ConfigError, "settings-contradict", "'nonzero'", "plan 'auto'"):
        found.codec_for(EngineConfig(compress="nonzero"), "link")
    path.write_text(path.read_text().replace('"reduced": 0.', '"reduced": 9.'))
    with raises(ConfigError, "out-of-range", "reduced of compress", str(path)):
        read_calibration(path)


def test_one_size_is_too_few() -> None:
    with pytest.raises(ConfigError, match="two sizes"):
        made(all_gather=exact(ALPHA_S, BETA)[:1])


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("format",), 7, ("format 7", "format 1")),
        (("world_size",), 4, ("3 names for 4 ranks",)),
        (("world_size",), 1, ("world_size", "1")),
        (("algorithm",), "tree", ("'tree'", "ring")),
        (("all_gather", "samples"), [], ("two sizes",)),
        (("all_gather", "samples", 0, "alone_s"), -1.0, ("all_gather: samples[0]", "alone_s")),
        (("reduce_scatter", "samples", 1, "pair_s"), float("nan"), ("samples[1]", "nan")),
        (("reduce_scatter", "samples", 1, "alone_s"), 0.0, ("131072 bytes in 0.0 s",)),
        (("update_s",), "much", ("update_s", "'much'")),
        (("update_s_per_byte",), 1e305, ("update_s_per_byte is 1e+305",)),
        (("library",), None, ("library",)),
    ],
)
def test_a_wrong_file_is_refused(path: tuple[Any, ...], value: object, words: Any) -> None:
    plain = json.loads(made().to_json())
    inside = plain
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    with pytest.raises(ConfigError) as caught:
        parse_calibration(json.dumps(plain), "link.json")
    assert all(word in str(caught.value) for word in ("link.json", *words))


@pytest.mark.parametrize("key", ["alpha_s", "beta_s_per_byte", "wire_share", "relative_error"])
def test_a_fit_that_was_changed_by_hand_is_refused(key: str) -> None:
    """The samples count, so it would change nothing."""
    found = json.loads(made().to_json())
    found["all_gather"][key] = 0.75
    with raises(ConfigError, "malformed-file", f"link.json: all_gather: {key} is 0.75"):
        parse_calibration(json.dumps(found), "link.json")
    del found["all_gather"][key]
    assert parse_calibration(json.dumps(found), "link.json") == made()


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the calibration .*missing\.json"):
        read_calibration(tmp_path / "missing.json")


def test_costs_can_be_read_without_torch() -> None:
    code = "import sys, dearmpi.tune.calibration; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"


def in_turn(begin_s: float, seconds: float, count: int, *, wire_s: float) -> list[Crossed]:
    """Operations with two in flight, of which one ends every ``seconds``."""
    return [
        Crossed(begin_s + max(0, number - 1) * seconds, begin_s + (number + 1) * seconds, wire_s)
        for number in range(count)
    ]


def test_a_wire_is_as_fast_as_a_stretch_of_training_has_found_it() -> None:
    """But for half of an operation, whose share before the first moment that counts is unknown."""
    slow, fast = in_turn(0.0, 0.1, 42, wire_s=0.1), in_turn(9.0, 0.08, 42, wire_s=0.1)
    assert wire_pace(slow) == 1.0
    assert wire_pace([*fast, *slow]) == pytest.approx(0.8 * 40 / 39.5)


def test_operations_that_other_ranks_began_earlier_make_no_wire_faster() -> None:
    """The first two of each stretch are over as soon as this rank joins them."""
    late = [Crossed(0.0, 0.001, 0.1), Crossed(0.0, 0.002, 0.1)]
    rest = in_turn(0.002, 0.1, 8, wire_s=0.1)
    assert wire_pace([*late, *rest]) == pytest.approx(1.0, abs=0.01)


def test_waiting_for_another_rank_makes_no_wire_slower() -> None:
    assert wire_pace(in_turn(0.0, 0.3, 8, wire_s=0.1)) == 1.0


def test_too_little_says_nothing() -> None:
    assert wire_pace([]) == 1.0
    assert wire_pace(in_turn(0.0, 0.001, 6, wire_s=0.01)) == 1.0
    apart = [Crossed(float(second), second + 0.1, 0.5) for second in range(8)]
    assert wire_pace(apart) == 1.0


@pytest.mark.parametrize(
    ("topology", "code", "told"),
    [("2x3", "malformed-file", "2x2 ranks"), ("2x2/0x1", "malformed-value", "2x2/0x1")],
)
def test_a_grid_that_was_changed_by_hand_is_refused(topology: str, code: str, told: str) -> None:
    dimension = DimensionTimes(2, exact(0.0, BETA), exact(0.0, BETA))
    grid = GridTimes("2x2@0,2,1,3", (dimension, dimension), 1.0)
    whole = made(hosts=("n0", "n0", "n1", "n1"), grid=grid)
    assert list(grid.costs_by_topology(whole.costs)) == ["2x2@0,2,1,3", "2x2/1x1@0,2,1,3"]
    text = whole.to_json().replace("2x2@0,2,1,3", topology)
    with raises(ConfigError, code, told):
        parse_calibration(text, "link.json")
