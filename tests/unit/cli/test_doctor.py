"""dear-train doctor, alone: what it says, and what it ends with."""

from __future__ import annotations

import atexit
import json
import sys
from pathlib import Path

import pytest
import torch

import dearmpi.comm.backends
from dearmpi.cli.main import main
from dearmpi.comm import lifecycle
from dearmpi.comm.process import Library
from dearmpi.doctor import examination
from dearmpi.doctor import launcher as launch
from dearmpi.errors import CommError

LIBRARY = Library("MPICH", "5.0.2", "4.1.2", "mpich", "MPI_THREAD_MULTIPLE")


@pytest.fixture
def _mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with MPI, whether or not this one has it."""
    monkeypatch.setattr(launch, "find_library", lambda: (LIBRARY, ""))


def examine(folder: Path, *arguments: str) -> int:
    return main(["doctor", "--run-folder", str(folder), *arguments])


@pytest.mark.usefixtures("_mpi")
def test_one_rank_is_examined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert examine(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("[ok] ", "[warn] ", " ")) for line in lines[:-2])
    assert [line.split()[1] for line in lines if line.startswith("[")][:2] == ["mpi", "launch"]
    assert any(str(tmp_path) in line for line in lines)


@pytest.mark.usefixtures("_mpi")
def test_a_failure_gives_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert examine(file) == 2
    text = capsys.readouterr().out
    assert "\n[fail] run folder" in text and "1 failure" in text


@pytest.mark.usefixtures("_mpi")
def test_everything_can_be_had_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert examine(tmp_path, "--json", "-") == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["findings"][0]["name"] == "mpi" and plain["ranks"][0]["rank"] == 0
    assert plain["exit_code"] == 0 and plain["mpi"]["name"] == "MPICH"
    assert plain["run_folder"]["free_bytes"] > 0
    assert examine(tmp_path, "--json", str(tmp_path / "doctor.json")) == 0
    assert capsys.readouterr().out.startswith("[ok]   mpi")
    again = json.loads((tmp_path / "doctor.json").read_text())
    assert again["ranks"][0]["versions"] == plain["ranks"][0]["versions"]


@pytest.mark.usefixtures("_mpi")
def test_folder_and_threads_are_those_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    for name in ("runs", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("DEAR_TRAIN_RUN_FOLDER", str(tmp_path / "runs"))
    monkeypatch.setenv("DEAR_TRAIN_THREADS", "3")
    assert main(["doctor", "--json", "-"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["ranks"][0]["threads"] == 3
    assert any(str(tmp_path / "runs") in finding["said"] for finding in plain["findings"])
    assert examine(tmp_path / "other") == 0  # the flag wins, as there
    assert str(tmp_path / "other") in capsys.readouterr().out
    monkeypatch.setenv("DEAR_TRAIN_RUN_FOLDR", "x")
    assert main(["doctor", "--json", "-"]) == 2
    captured = capsys.readouterr()
    assert "DEAR_TRAIN_RUN_FOLDR is no setting" in captured.err
    assert "DEAR_TRAIN_RUN_FOLDR" in json.loads(captured.out)["error"]


@pytest.mark.usefixtures("_mpi")
def test_a_report_that_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert examine(tmp_path, "--json", str(tmp_path / "nowhere" / "doctor.json")) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.fixture
def _no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle._Process, "world", None)
    monkeypatch.setattr(atexit, "register", lambda *arguments: None)
    monkeypatch.setitem(sys.modules, "dearmpi.comm.backends.mpi", None)
    monkeypatch.delattr(dearmpi.comm.backends, "mpi", raising=False)


@pytest.mark.usefixtures("_no_mpi")
def test_a_machine_without_mpi_is_told_how_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert examine(tmp_path) == 3
    text = capsys.readouterr().out
    assert text.startswith("[fail] mpi") and "-> pip install 'dearmpi[mpich]'" in text
    assert "\n[ok]   run folder" in text  # the rest is looked at all the same


@pytest.mark.usefixtures("_no_mpi")
def test_the_first_of_ranks_that_did_not_find_each_other_speaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    for number, speaks in (("0", True), ("3", False)):
        monkeypatch.setenv("SLURM_PROCID", number)
        assert examine(tmp_path) == 3
        assert ("[fail] launch      4 processes" in capsys.readouterr().out) == speaks


def test_broken_libraries_are_told_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dearmpi.doctor.examination", None)
    assert examine(tmp_path) == 1
    captured = capsys.readouterr()
    assert "[fail] packages" in captured.out and "Traceback" not in captured.out + captured.err
    assert examine(tmp_path, "--json", "-") == 1
    plain = json.loads(capsys.readouterr().out)
    assert [finding["name"] for finding in plain["findings"]] == ["packages"]
    monkeypatch.setenv("PMI_RANK", "3")  # the others wait for this rank, and cannot tell why
    assert examine(tmp_path) == 1
    captured = capsys.readouterr()
    assert not captured.out and "[rank 3 on " in captured.err and "packages" in captured.err


@pytest.mark.usefixtures("_mpi")
@pytest.mark.parametrize(
    ("failure", "code", "told"),
    [
        (CommError("rank 1 does not answer"), 8, "rank 1 does not answer"),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt"),
        (AssertionError(), 1, "AssertionError"),
    ],
)
def test_what_was_found_before_a_failure_is_in_the_json(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    code: int,
    told: str,
) -> None:
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(examination, "_examine_network", fail)
    assert examine(tmp_path, "--json", "-") == code
    plain = json.loads(capsys.readouterr().out)
    assert plain["error"] == told and plain["exit_code"] is None and plain["ranks"]
    assert "cores" in [finding["name"] for finding in plain["findings"]]
