"""The folder of runs: tried, judged, and left as it was."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dearmpi.doctor import examination as module
from dearmpi.doctor.examination import FolderTrial, judge_folder, try_folder
from tests.fakes.ranks import run_ranks

GOOD = FolderTrial(
    Path("/data"), ["n0", "n1"], bytes_s=1e9, free_bytes=10**12, read=[("before", "after")] * 2
)


def test_a_good_folder_is_measured_by_all_ranks_and_left_as_it_was(tmp_path: Path) -> None:
    root = tmp_path / "not" / "yet" / "made"
    trials = run_ranks(3, lambda world: try_folder(world, root))
    assert trials[0].folder == tmp_path and trials[0].bytes_s > 0 and trials[0].free_bytes > 0
    assert [trial.read for trial in trials] == [(("before", "after"),) * 3] * 3
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_to_is_a_failure(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_text("no folder")
    trial = run_ranks(2, lambda world: try_folder(world, root / "runs"))[0]
    finding = judge_folder(trial)
    assert finding.status == "fail" and str(root) in finding.said
    assert "Not a directory" in finding.said and "--run-folder" in finding.cure


def test_a_disk_that_fills_up_is_a_failure_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(path: Path) -> float:
        path.write_text("some of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write_speed", fill_up)
    finding = judge_folder(run_ranks(2, lambda world: try_folder(world, tmp_path))[0])
    assert finding.status == "fail" and "No space left on device" in finding.said
    assert not list(tmp_path.iterdir())


def test_what_a_killed_trial_left_is_removed_and_one_under_way_is_not(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    places = [folder / f".dear-doctor-{age}" for folder in (tmp_path, root) for age in ("2h", "0h")]
    for place in places:
        place.mkdir()
        (place / "sample").write_text("left")
        if place.name.endswith("2h"):
            os.utime(place, (time.time() - 7200,) * 2)
    run_ranks(2, lambda world: try_folder(world, root))
    assert [place.exists() for place in places] == [False, True, False, True]


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, "ok", ["1000 MB/s", "1000 GB free"]),
        ({"read": [("before", "after"), ("", "")]}, "fail", ["rank 1 on n1", "share"]),
        ({"read": [("before", "after"), ("before", "before")]}, "warn", ["rank 1 on n1", "old"]),
        ({"bytes_s": 5e6}, "warn", ["5 MB/s", "faster"]),
        ({"free_bytes": 10**9}, "warn", ["1 GB free", "room"]),
    ],
)
def test_what_was_tried_is_judged(
    changes: dict[str, object], status: str, words: list[str]
) -> None:
    names = {name: getattr(GOOD, name) for name in FolderTrial.__slots__}
    finding = judge_folder(FolderTrial(**(names | changes)))
    text = f"{finding.said} {finding.cure}"
    assert finding.status == status and all(word in text for word in words), text


def test_a_place_that_may_not_even_be_looked_at_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(path: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("dearmpi.doctor.examination.nearest", look)
    finding = judge_folder(run_ranks(2, lambda world: try_folder(world, tmp_path / "runs"))[0])
    assert finding.status == "fail" and "Permission denied" in finding.said
