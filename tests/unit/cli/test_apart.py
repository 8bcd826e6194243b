"""Files that a command would write over each other, or over what it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from dearmpi.cli.flags import check_apart
from dearmpi.cli.main import main

REPLAY = ["--feed-forward-s", "0.001", "--backprop-s", "0.002"]


@pytest.mark.parametrize(
    ("command", "first", "second"),
    [
        (["simulate"], "--json", "--picture"),
        (["simulate"], "--profile", "--json"),
        (["simulate"], "--network", "--json"),
        (["bench", "--workload", "equal:0.01:2", *REPLAY], "--json", "--picture"),
        (["bench"], "--workload", "--json"),
        (["plan", "--profile", "a", "--calibration", "b"], "--out", "--picture"),
        (["plan", "--calibration", "b"], "--profile", "--out"),
        (["plan", "--profile", "a"], "--calibration", "--picture"),
        (["profile", "--task", "digits"], "--config", "--out"),
    ],
)
def test_one_file_for_two_things_is_refused_and_left_as_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    first: str,
    second: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "file.svg"
    file.write_text("{}")
    (tmp_path / "link.svg").symlink_to(file)
    assert main([*command, first, "file.svg", second, str(tmp_path / "link.svg")]) == 2
    verb = "writes" if first in ("--json", "--out") else "reads"
    told = capsys.readouterr().err
    assert f"{second} is {tmp_path}/link.svg, which {first} {verb} too" in told
    assert file.read_text() == "{}"


def test_a_device_takes_all_and_files_that_are_not_there_yet_differ(tmp_path: Path) -> None:
    check_apart({"--json": Path("/dev/null"), "--picture": Path("/dev/null")})
    check_apart({"--json": tmp_path / "a", "--picture": tmp_path / "b", "--out": None})
    check_apart({"--json": tmp_path / "10GbE"}, {"--network": "10GbE", "--profile": None})
