"""A command whose ranks do not meet."""

from __future__ import annotations

import os

import pytest

from dearmpi.cli.main import main
from dearmpi.comm import lifecycle as module
from dearmpi.comm import process
from dearmpi.errors import CommError, DearError, LaunchError


@pytest.fixture(params=["run", "profile", "calibrate"])
def command(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def fail_to_connect(monkeypatch: pytest.MonkeyPatch, error: DearError, *, rank: int) -> None:
    """This process is one of two that were launched, and ``connect`` raises ``error``."""

    def connect(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(module, "connect", connect)
    monkeypatch.setattr(process, "_GRACE_OF_SILENT_S", 0.0)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))


def test_a_rank_that_alone_cannot_connect_says_which_it_is(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_to_connect(monkeypatch, CommError("no other rank answers"), rank=1)
    assert main([command]) == 8
    told = capsys.readouterr().err
    assert told == f"[rank 1 on {os.uname().nodename}] error: no other rank answers\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_what_every_rank_meets_is_told_by_the_first(
    rank: int, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_to_connect(monkeypatch, LaunchError("no MPI"), rank=rank)
    assert main([command]) == 3
    assert capsys.readouterr().err == ("" if rank else "dear-train: error: no MPI\n")


def test_wrong_settings_are_told_even_where_the_ranks_do_not_meet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_to_connect(monkeypatch, LaunchError("no MPI"), rank=0)
    assert main(["run", "--window", "two"]) == 2
    assert "--window is 'two'" in capsys.readouterr().err
