"""A user's path that leads to no regular file is refused: to open a FIFO waits for ever."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from dearmpi.cli.main import main
from dearmpi.errors import DearError
from dearmpi.plan.data.fields import regular_file
from dearmpi.plan.data.plan import read_plan
from dearmpi.plan.model.profile import read_profile
from dearmpi.plan.model.steps_check import read_steps
from dearmpi.report.read.run_files import read_history
from dearmpi.report.read.trace import read_trace
from dearmpi.train.checkpoint.manifest import FILE_NAME, read_manifest
from dearmpi.train.checkpoint.survey import resolve
from dearmpi.train.settings.config_file import read_config
from dearmpi.train.tasks.images import read_picture
from dearmpi.tune.calibration import read_calibration
from dearmpi.tune.topology import read_topology

NULL = Path("/dev/null")  # a device, at which no test can hang


def test_a_regular_file_and_a_link_to_one_are_taken(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("text")
    link.symlink_to(path)
    assert regular_file(path) == path and regular_file(str(link)) == link


def test_anything_else_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        before = os.getcwd()
        os.chdir(tmp_path)  # the path of a socket must be short
        server.bind("socket")
        os.chdir(before)
    for name, told in {
        "fifo": "it is a FIFO or pipe, not a regular file",
        "link": "it is a FIFO or pipe, not a regular file",
        "socket": "it is a device or socket, not a regular file",
        "": "Is a directory",
        "none": "No such file",
    }.items():
        with pytest.raises(OSError) as caught:
            regular_file(tmp_path / name)
        assert told in (caught.value.strerror or "")
        assert caught.value.filename == str(tmp_path / name)


@pytest.mark.parametrize(
    "read",
    [
        read_calibration,
        read_config,
        read_history,
        read_plan,
        read_profile,
        read_steps,
        lambda path: read_picture(path, 8),
        lambda path: read_topology(str(path)),
        read_trace,
    ],
)
def test_every_reader_of_a_users_path_refuses_a_device(read: Callable[[Path], object]) -> None:
    with pytest.raises(DearError, match="not a regular file") as caught:
        read(NULL)
    assert str(NULL) in str(caught.value)


def test_files_of_a_run_that_are_none_are_damage(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    (folder / FILE_NAME).symlink_to(NULL)
    with pytest.raises(DearError, match="not a regular file"):
        read_manifest(folder)
    (tmp_path / "latest").symlink_to(NULL)
    with pytest.raises(DearError, match="not a regular file"):
        resolve(tmp_path)


def test_a_run_folder_that_is_no_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    os.mkfifo("runs/a")
    for resume in ([], ["--resume", "auto"]):
        assert main(["run", "--task", "digits", "--name", "a", *resume]) != 0
        told = capsys.readouterr().err
        assert "runs/a" in told and "Not a directory" in told and "begun-from" not in told


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "--network", str(NULL)],
        ["simulate", "--profile", str(NULL)],
        ["plan", "--profile", str(NULL), "--calibration", str(NULL)],
        ["run", "--task", "digits", "--config", str(NULL)],
        ["run", "--task", "digits", "--plan", str(NULL)],
    ],
)
def test_commands_name_what_is_no_file(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert f"{NULL}: it is a device" in capsys.readouterr().err
