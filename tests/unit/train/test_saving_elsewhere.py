"""Saving where the system forbids a part of what it would like to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dearmpi.comm.world import World
from dearmpi.train import checkpoint, saving
from dearmpi.train.settings import RunSettings
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
