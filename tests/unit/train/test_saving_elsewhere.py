"""Saving where the system forbids a part of what it would like to do."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dearmpi.comm.world import World
from dearmpi.train import checkpoint
from dearmpi.train.run import saving
from dearmpi.train.settings.settings import RunSettings
from tests.unit.train.points import SGD, make_job, train


def test_an_old_checkpoint_that_cannot_be_removed_is_told_and_training_goes_on(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", "step-00000002")

    monkeypatch.setattr(checkpoint, "prune", refuse)
    settings = RunSettings(max_steps=8, checkpoint_interval=2, **SGD)
    with pytest.warns(UserWarning, match="old checkpoint is left over: .*step-00000002.*remove it"):
        train(make_job(alone, settings), tmp_path)
    latest = checkpoint.find_latest(tmp_path)
    assert latest is not None and latest.name == "step-00000008"


@pytest.mark.parametrize("first_call", [1, 2], ids=["before a save", "after it"])
def test_a_passing_error_of_the_file_system_while_pruning_ends_no_run(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_call: int
) -> None:
    """Neither may a request to stop be left without its checkpoint, nor one be lost to the run."""
    prune, iterdir, calls = checkpoint.prune, Path.iterdir, itertools.count(1)

    def stale(folder: Path) -> Iterator[Path]:
        if folder.name == "checkpoints":
            raise OSError(errno.ESTALE, "Stale file handle")
        return iterdir(folder)

    def prune_at_a_bad_moment(folder: Path, keep: int) -> tuple[Path, ...]:
        with monkeypatch.context() as patch:
            if next(calls) == first_call:
                patch.setattr(Path, "iterdir", stale)
            return prune(folder, keep)

    monkeypatch.setattr(checkpoint, "prune", prune_at_a_bad_moment)
    (tmp_path / "checkpoints").mkdir()
    settings = RunSettings(max_steps=4, checkpoint_interval=2, keep=1, **SGD)
    with pytest.warns(UserWarning, match="kept for now: cannot list .*: Stale file handle"):
        train(make_job(alone, settings), tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


@pytest.mark.parametrize("niceness", [0, 19])
def test_a_process_that_yields_to_others_saves_as_well(
    monkeypatch: pytest.MonkeyPatch, niceness: int
) -> None:
    """Who is no administrator cannot become less nice again."""
    set_to: list[int] = []

    def set_priority(_: int, __: int, value: int) -> None:
        if value < niceness:
            raise PermissionError(errno.EACCES, "Permission denied")
        set_to.append(value)

    monkeypatch.setattr(os, "getpriority", lambda *_: niceness)
    monkeypatch.setattr(os, "setpriority", set_priority)
    saving._be_nice()
    assert set_to == [max(10, niceness)]
