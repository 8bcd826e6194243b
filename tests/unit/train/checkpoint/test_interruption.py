"""A kill or a full disk leaves a good checkpoint: a new one is complete or not there."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dearmpi.errors import CheckpointError
from dearmpi.train import checkpoint, disk
from dearmpi.train.checkpoint import Snapshot, store
from dearmpi.train.checkpoint.survey import name_latest
from tests.codes import raises
from tests.unit.train.checkpoint.example_snapshot import content_of, make_snapshot


class KilledError(BaseException):
    """Stands in for a kill: nothing after it runs, not even clean-up."""


KILL_POINTS = ["write_part", "fsync", "write_text", "rename", "remove"]


@pytest.mark.parametrize("point", KILL_POINTS)
@pytest.mark.parametrize("step", [10, 20], ids=["same step", "next step"])
def test_a_kill_at_any_moment_leaves_a_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, step: int
) -> None:
    checkpoint.save(tmp_path, make_snapshot(10, fill=1.0))
    for nth in range(8):
        saved = tmp_path / "backup"
        shutil.copytree(tmp_path / "checkpoints", saved / "checkpoints")
        shutil.copy(tmp_path / "latest", saved / "latest")
        with monkeypatch.context() as patch:
            kill_at(patch, point, nth)
            try:
                checkpoint.save(saved, make_snapshot(step, fill=2.0))
                killed = False
            except KilledError:
                killed = True
        found = checkpoint.find_latest(saved)
        assert found is not None
        assert checkpoint.load(found).model["weight"][0, 0] in (1.0, 2.0)
        if step == 20:
            assert (saved / (saved / "latest").read_text().strip()).is_dir()
        path = checkpoint.save(saved, make_snapshot(step, fill=3.0))
        assert checkpoint.load(path).model["weight"][0, 0] == 3.0
        names = {p.name for p in (saved / "checkpoints").iterdir()}
        assert names == {"step-00000010", f"step-{step:08d}"}
        shutil.rmtree(saved)
        if not killed:
            assert nth > 0 or (point == "remove" and step == 20), "the point was never reached"
            return
    pytest.fail("the point was reached more often than was tried")


def kill_at(patch: pytest.MonkeyPatch, point: str, nth: int) -> None:
    """Raise KilledError at the ``nth`` call of ``point``, and stop the clean-up from running."""
    owner: Any = {
        "write_part": store,
        "fsync": os,
        "write_text": disk,
        "rename": Path,
        "remove": store,
    }[point]
    original = getattr(owner, point)
    calls = iter(range(1000))

    def kill(*args: Any, **options: Any) -> Any:
        if next(calls) == nth:
            patch.setattr(shutil, "rmtree", lambda *a, **o: None)
            raise KilledError
        return original(*args, **options)

    patch.setattr(owner, point, kill)


def test_a_checkpoint_is_on_the_disk_before_latest_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power failure may keep the name alone."""
    done: list[str] = []

    def noting(name: str, original: Callable[..., None]) -> Callable[..., None]:
        def note(*args: Path) -> None:
            done.append(f"{name} {args[0].name}")
            original(*args)

        return note

    monkeypatch.setattr(Path, "rename", noting("rename", Path.rename))
    monkeypatch.setattr(disk, "sync_folder", noting("sync", disk.sync_folder))
    monkeypatch.setattr(store, "name_latest", noting("name the latest in", name_latest))
    checkpoint.save(tmp_path, make_snapshot(10))
    folder = ".writing-step-00000010"
    assert done[done.index(f"rename {folder}") - 1 :][:4] == [
        f"sync {folder}",
        f"rename {folder}",
        "sync checkpoints",
        f"name the latest in {tmp_path.name}",
    ]


@pytest.mark.parametrize("point", ["write_part", "fsync", "write_text", "mkdir"])
def test_a_full_disk_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    path = checkpoint.save(tmp_path, make_snapshot(10))
    before = content_of(tmp_path)
    with monkeypatch.context() as patch:
        owner: Any = {"write_part": store, "fsync": os, "mkdir": Path}.get(point, disk)

        def fail(*args: Any, **options: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(owner, point, fail)
        with raises(CheckpointError, "disk-full", "disk is"):
            checkpoint.save(tmp_path, make_snapshot(20))
    assert content_of(tmp_path) == before
    assert checkpoint.find_latest(tmp_path) == path
    checkpoint.load(path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    path = checkpoint.save(small_disk, make_snapshot(10))
    before = content_of(small_disk)
    large = Snapshot(20, {"w": torch.zeros(200_000)}, {}, [], {})
    with raises(CheckpointError, "disk-full", "disk is", 800000) as caught:
        checkpoint.save(small_disk, large)
    assert "step-00000020" in str(caught.value)
    assert content_of(small_disk) == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert checkpoint.save(small_disk, make_snapshot(20)).exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with raises(CheckpointError, "cannot-write", "step-00000010"):
        checkpoint.save(tmp_path, make_snapshot(10))
