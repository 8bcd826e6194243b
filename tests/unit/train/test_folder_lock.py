"""Occupation: one job at a time has a run folder."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dearmpi.errors import CheckpointError, ConfigError
from dearmpi.train.disk import lock_folder
from tests.codes import raises

_OCCUPY = """
import sys
from pathlib import Path
from dearmpi.train.disk import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("there", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_job(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has ``path``."""
    command = [sys.executable, "-c", _OCCUPY, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "DEARMPI_JOB", "DEARMPI_START"):
        monkeypatch.delenv(name, raising=False)


def test_a_second_job_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    path = tmp_path / "in-use-by"
    with another_job(path) as other:
        told = (tmp_path, f"process {other.pid} on ")
        with raises(ConfigError, "run-folder-in-use", *told), lock_folder(path):
            pass


def test_a_job_that_was_killed_has_nothing_any_more(tmp_path: Path) -> None:
    path = tmp_path / "in-use-by"
    with another_job(path) as other:
        other.kill()
        other.wait()
        with lock_folder(path):
            assert "process" in path.read_text()
    with lock_folder(path):
        pass


def test_a_job_that_is_queued_again_takes_over_from_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of a node that is gone may stay for long."""
    path = tmp_path / "in-use-by"
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    with another_job(path):
        with raises(ConfigError, "run-folder-in-use", 41), lock_folder(path):
            pass  # two steps of one job
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        with lock_folder(path):
            pass
    with another_job(path):
        monkeypatch.setenv("SLURM_JOB_ID", "1")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
        with raises(ConfigError, "run-folder-in-use", 41), lock_folder(path):
            pass


@pytest.mark.parametrize("slurm", [None, "41"])
def test_a_start_again_takes_over_from_those_before_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: str | None
) -> None:
    path = tmp_path / "in-use-by"
    if slurm is not None:
        monkeypatch.setenv("SLURM_JOB_ID", slurm)
    monkeypatch.setenv("DEARMPI_JOB", "a1")
    monkeypatch.setenv("DEARMPI_START", "1")
    with another_job(path):
        for job, start in (("a1", "0"), ("a1", "1"), ("b2", "2")):
            monkeypatch.setenv("DEARMPI_JOB", job)
            monkeypatch.setenv("DEARMPI_START", start)
            with raises(ConfigError, "run-folder-in-use", "a1"), lock_folder(path):
                pass
        monkeypatch.setenv("DEARMPI_JOB", "a1")
        monkeypatch.setenv("DEARMPI_START", "2")
        with lock_folder(path):
            pass


def test_a_folder_that_is_removed_or_taken_over_is_this_jobs_no_more(tmp_path: Path) -> None:
    path = tmp_path / "in-use-by"
    with lock_folder(path) as own:
        own.check()
        path.unlink()
        with raises(CheckpointError, "run-folder-lost", tmp_path):
            own.check()
        with (
            another_job(path) as other,
            raises(CheckpointError, "run-folder-lost", other.pid, "--name"),
        ):
            own.check()


def test_a_working_folder_that_is_removed_with_the_run_folder_is_told_like_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = tmp_path / "working"
    (working / "runs").mkdir(parents=True)
    monkeypatch.chdir(working)
    with lock_folder(Path("runs", "in-use-by")) as own:
        shutil.rmtree(working)
        with raises(CheckpointError, "run-folder-lost", working, "/runs/in-use-by"):
            own.check()


@pytest.mark.parametrize(
    ("code", "told"),
    [(errno.EACCES, "cannot look at"), (errno.EIO, "cannot look at"), (errno.ESTALE, "removed or")],
)
def test_a_folder_that_may_not_be_looked_at_is_not_called_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, told: str
) -> None:
    path = tmp_path / "in-use-by"

    def refuse(_: Path) -> None:
        raise OSError(code, os.strerror(code))

    with lock_folder(path) as own:
        monkeypatch.setattr("dearmpi.train.disk.os.stat", refuse)
        with pytest.raises(CheckpointError) as caught:
            own.check()
        monkeypatch.undo()
    message = str(caught.value)
    assert told in message and os.strerror(code) in message
    assert ("removed" in message) == (code == errno.ESTALE)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "in-use-by"
    with raises(CheckpointError, "cannot-write", path), lock_folder(path):
        pass


def test_a_full_disk_is_told_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    path = tmp_path / "in-use-by"
    with raises(CheckpointError, "disk-full", path, "free space"), lock_folder(path):
        pass
