"""dear-train plan: what it writes, tells and draws, and what it refuses."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dearmpi.cli.main import main
from dearmpi.plan.data.plan import read_plan
from dearmpi.plan.data.workload import read_workload
from dearmpi.plan.model.codec_cost import CodecCost
from dearmpi.plan.model.profile import profile_workload
from dearmpi.tune.calibration import Calibration, SizeTimes
from dearmpi.version import __version__
from tests.unit.cli.bare import run_bare

TIMES = tuple(SizeTimes(n, 1e-3 + 8e-9 * n, 2e-3 + 16e-9 * n) for n in (2**14, 2**24))
LINK = Calibration(("a", "a", "b", "b"), "some MPI", "ring", TIMES, TIMES)


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """Arguments: a profile of six layers, and a link, both of four ranks."""
    profile = profile_workload(read_workload("equal:24:6"), feed_forward_s=0.1, backprop_s=0.2)
    (tmp_path / "profile.json").write_text(replace(profile, world_size=4).to_json())
    (tmp_path / "link.json").write_text(LINK.to_json())
    files = (tmp_path / "profile.json", tmp_path / "link.json")
    return ["plan", "--profile", str(files[0]), "--calibration", str(files[1])]


def test_the_plan_is_told_written_and_drawn(
    tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    assert main([*given, "--out", str(path), "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    plan = read_plan(path)
    assert plan.eager and plan.world_size == 4
    assert plan.describe() in text and f"wrote {path}" in text and f"wrote {picture}" in text
    assert "4 ranks: reduce-scatter 1.000 ms + 8." in text
    assert "each bucket: update 1.000 ms" in text  # the calibration has none
    drawn = picture.read_text()
    ElementTree.fromstring(drawn)
    for number in range(len(plan.buckets)):
        assert f"<title>RS{number}: " in drawn and f"<title>AG{number}: " in drawn
    assert "simulated iteration over 4 ranks" in drawn and "with handing buckets over" in drawn
    (told,) = re.findall(r">waits ([0-9.]+) ms<", drawn)
    hatched = re.findall(r"<title>waits for communication: ([0-9.]+) ms<", drawn)
    assert sum(map(float, hatched)) == pytest.approx(float(told), abs=0.1 * len(hatched))


def test_half_precision_on_the_wire_is_planned_for(
    tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plans = []
    for comm_dtype in ("fp32", "bf16"):
        assert main([*given, "--comm-dtype", comm_dtype, "--out", str(tmp_path / "p.json")]) == 0
        plans.append(read_plan(tmp_path / "p.json"))
    assert "reduce-scatter 1.000 ms + 4." in capsys.readouterr().out
    assert plans[1].prediction.communication_s < 0.7 * plans[0].prediction.communication_s


def test_compression_is_planned_for_as_it_was_measured(
    tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    codec = CodecCost("int8", 0.252, 0.252, 1e-9, 2e-9)
    (tmp_path / "link.json").write_text(replace(LINK, codec=codec).to_json())
    plans = []
    for flags in ([], ["--compress", "int8"]):
        assert main([*given, *flags, "--out", str(tmp_path / "p.json")]) == 0
        plans.append(read_plan(tmp_path / "p.json"))
    assert plans[1].prediction.communication_s < 0.4 * plans[0].prediction.communication_s
    assert plans[1].origin.endswith("--compress int8") and "--compress" not in plans[0].origin
    assert main([*given, "--compress", "int4"]) == 2
    assert "dear-train calibrate --compress int4" in capsys.readouterr().err


def test_the_plan_says_what_it_was_made_for(
    tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link.json").write_text(replace(LINK, algorithm="native").to_json())
    assert main([*given, "--comm-dtype", "bf16", "--out", str(tmp_path / "p.json")]) == 0
    made_for = "32 samples per rank and micro-batch, native reduce-scatters, --comm-dtype bf16"
    assert made_for in read_plan(tmp_path / "p.json").origin
    assert made_for in capsys.readouterr().out


def test_for_another_number_of_ranks_and_without_eager_updates(
    tmp_path: Path, given: list[str]
) -> None:
    path = tmp_path / "plan.json"
    arguments = ["--no-eager", "--gather", "gradients", "--out", str(path)]
    ranks = ["--world-size", "64", "--samples-per-rank", "32"]
    assert main([*given, *ranks, *arguments]) == 0
    plan = read_plan(path)
    assert plan.world_size == 64 and not plan.eager


def test_a_profile_of_other_ranks_serves_where_its_samples_per_rank_are_meant(
    tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    for arguments, words in (
        ([], ["profile.json was measured on 4 ranks", "is for 8", "--samples-per-rank 32"]),
        (["--samples-per-rank", "16"], ["is 16", "profile.json was measured with 32 samples"]),
    ):
        assert main([*given, "--world-size", "8", "--out", str(path), *arguments]) == 2
        text = capsys.readouterr().err
        assert all(word in text for word in words), text
        assert not path.exists()
    arguments = ["--world-size", "8", "--samples-per-rank", "32", "--out", str(path)]
    assert main([*given, *arguments]) == 0
    assert "32 samples per rank and micro-batch" in read_plan(path).origin  # which a run tells


def test_files_of_another_version_are_taken_and_told_of(
    tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given) == 0
    assert "was made by" not in capsys.readouterr().out
    for name in ("profile", "link"):
        path = tmp_path / f"{name}.json"
        path.write_text(path.read_text().replace(f'"{__version__}"', '"0.0.9"'))
    assert main(given) == 0
    text = capsys.readouterr().out
    for name in ("profile", "link"):
        path = tmp_path / f"{name}.json"
        assert f"{path} was made by dearmpi 0.0.9, and this is {__version__}" in text
    assert main(["simulate", "--profile", given[2], "--network", given[4], "--method", "dear"]) == 0
    assert capsys.readouterr().out.count("was made by dearmpi 0.0.9") == 2


def test_a_calibration_that_saw_no_time_per_byte_is_told(
    tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    samples = (SizeTimes(2**16, 2e-3, 2e-3), SizeTimes(2**19, 1.5e-3, 1.5e-3))
    link = replace(LINK, reduce_scatter=samples)
    (tmp_path / "link.json").write_text(link.to_json())
    assert main(given) == 0
    assert capsys.readouterr().out.count("no time per byte was seen") == 1


def test_other_micro_batches_only_compute(tmp_path: Path, given: list[str]) -> None:
    plans = []
    for number in ("1", "4"):
        path = tmp_path / f"plan{number}.json"
        assert main([*given, "--gradient-accumulation-steps", number, "--out", str(path)]) == 0
        plans.append(read_plan(path))
    picture = tmp_path / "plan.svg"
    assert main([*given, "--gradient-accumulation-steps", "4", "--picture", str(picture)]) == 0
    assert "of which the last micro-batch" in picture.read_text()
    one, four = plans
    assert (four.buckets, four.schedule) == (one.buckets, one.schedule)
    added_s = 3 * one.prediction.compute_s
    assert four.prediction.iteration_s == pytest.approx(one.prediction.iteration_s + added_s)
    assert four.prediction.bound_s == pytest.approx(one.prediction.bound_s + added_s)


def test_it_needs_neither_torch_nor_mpi(tmp_path: Path, given: list[str]) -> None:
    told = run_bare(*given, "--picture", str(tmp_path / "plan.svg"))
    assert "predicted iteration" in told


def test_files_that_are_mixed_up_are_named(
    tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    profile, link, plan = (str(tmp_path / f"{name}.json") for name in ("profile", "link", "plan"))
    assert main([*given, "--out", plan]) == 0
    for flag, path, words in (
        (
            "--profile",
            link,
            "link.json is a calibration, as dear-train calibrate writes it; give a pro",
        ),
        (
            "--profile",
            plan,
            "plan.json is a plan, as dear-train plan writes it; give a profile, as",
        ),
        (
            "--calibration",
            profile,
            "profile.json is a profile, as dear-train profile writes it; give a",
        ),
    ):
        assert main([*given, flag, path]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--world-size", "1"], ["--world-size is 1", "from 2"]),
        (["--world-size", f"{10**400}"], ["--world-size", "to 1048576"]),
        (["--profile", "/nowhere.json"], ["cannot read the profile /nowhere.json"]),
        (["--calibration", "/nowhere.json"], ["cannot read the calibration /nowhere.json"]),
        (["--out", "/nowhere/at/all.json"], ["cannot write", "/nowhere/at"]),
        (["--picture", "plan.pdf"], ["plan.pdf", ".svg or .png"]),
        (["--gather", "all"], ["--gather", "parameters"]),
    ],
)
def test_what_makes_no_sense_is_refused(
    given: list[str],
    arguments: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*given, *arguments]) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in words), text


def test_both_files_are_needed(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given[:3]) == 2
    assert "--calibration" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read the {what} {path}: No such file or directory"),
        (Path(), "{path} is a folder"),
        (b"\xff\xfe", "cannot read the {what} {path}: it is no text"),
        ("", "{path} is not JSON, or is cut off"),
        ("half", "{path} is not JSON, or is cut off"),
        ("[3]", "{path} is [3], and no object in braces"),
        ('{"hosts": ["a", "b"], "world_size": 2}', "{path} is of another kind"),
        ("less", "is missing; "),
    ],
    ids=["none", "folder", "bytes", "empty", "cut off", "list", "environment", "field"],
)
@pytest.mark.parametrize("what", ["profile", "calibration"])
def test_a_file_that_is_none_is_refused_in_one_sentence_with_the_cure(
    given: list[str],
    what: str,
    content: Any,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "odd.json"
    right = Path(given[given.index(f"--{what}") + 1]).read_text()
    if content == "half":
        content = right[: len(right) // 2]
    elif content == "less":
        content = right.replace('"name"', '"nome"', 1).replace('"library"', '"nolib"', 1)
    if isinstance(content, Path):
        path.mkdir()
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main([*given, f"--{what}", str(path)]) == 2
    text = capsys.readouterr().err
    assert words.format(what=what, path=path) in text
    assert re.search(r"; (give|profile|measure) .*\S\n$", text), text
    assert text.count("\n") == 1 or content == Path()
