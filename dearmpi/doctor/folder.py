"""Folder: whether runs can be kept in a folder, and whether all ranks see the same one."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dearmpi.comm.world import World
from dearmpi.doctor.finding import Finding, fail, ok, warn
from dearmpi.train import disk

_SAMPLE_BYTES = 16 * 1024 * 1024
_SLOW_BYTES_S = 20e6
_LITTLE_BYTES = 2e9
_BEFORE, _AFTER = "before", "after"
_SCRATCH = ".dear-doctor-"
_LEFT_AFTER_S = 3600.0  # a trial takes seconds, so what is this old was left by one that was killed


@dataclass(frozen=True, slots=True)
class FolderTrial:
    """What rank 0 found in ``folder``, the nearest that exists, and what the others read there.

    error: why it could not be used; the rest then counts for nothing. bytes_s: written through to
    the disk. read: each rank's two readings of a file, before and after rank 0 replaced it.
    """

    folder: Path
    hosts: Sequence[str]
    error: str = ""
    bytes_s: float = 0.0
    free_bytes: int = 0
    read: Sequence[tuple[str, str]] = ()


def try_folder(world: World, root: Path) -> FolderTrial:
    """Write, rename and read in the folder of runs, and leave nothing behind (collective).

    What killed trials left there is removed, and where they were while there was no ``root`` yet.
    """
    folder, error, bytes_s, free_bytes = root.absolute(), "", 0.0, 0
    scratch: Path | None = None
    try:
        if world.is_root:
            try:
                folder = nearest(folder)
                remove_left(folder, root.absolute().parent)
                scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=folder))
                bytes_s = _write_speed(scratch / "sample")
                free_bytes = shutil.disk_usage(scratch).free
                disk.write_text(scratch / "replaced", _BEFORE)
            except OSError as problem:
                error = problem.strerror or str(problem)
        place = Path(world.broadcast_text(str(scratch or "")))
        before = read(place / "replaced")
        world.barrier()
        if scratch is not None and not error:
            disk.write_text(scratch / "replaced", _AFTER)
        world.barrier()
        readings = zip(
            world.all_gather_text(before),
            world.all_gather_text(read(place / "replaced")),
            strict=True,
        )
        return FolderTrial(folder, world.hosts, error, bytes_s, free_bytes, tuple(readings))
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def judge_folder(trial: FolderTrial) -> Finding:
    """Whether checkpoints are safe there, and found again by every rank."""
    name = "run folder"
    if trial.error:
        return fail(
            name,
            f"cannot write to {trial.folder}: {trial.error}",
            cure="choose a place that can be written to, with --run-folder",
        )
    for rank, (before, after) in enumerate(trial.read):
        where = f"rank {rank} on {trial.hosts[rank]}"
        if before != _BEFORE:
            return fail(
                name,
                f"{where} does not see what rank 0 on {trial.hosts[0]} wrote to {trial.folder}",
                cure="choose a folder on a file system that all hosts share, with --run-folder",
            )
        if after != _AFTER:
            return warn(
                name,
                f"{where} still sees the old file after rank 0 replaced it in {trial.folder}",
                cure="mount the file system with a shorter attribute cache (NFS: actimeo=1), or "
                "choose another",
            )
    said = (
        f"{trial.folder}: {trial.bytes_s / 1e6:.0f} MB/s written through to the disk, files "
        f"replaced in one piece, {trial.free_bytes / 1e9:.0f} GB free"
    )
    if trial.bytes_s < _SLOW_BYTES_S:
        return warn(name, said, cure="choose a faster disk with --run-folder, or save less often")
    if trial.free_bytes < _LITTLE_BYTES:
        return warn(name, said, cure="make room, or choose another place with --run-folder")
    return ok(name, said)


def remove_left(*folders: Path) -> None:
    """Remove what trials that were killed have left in ``folders``, as far as that may be done."""
    oldest_s = time.time() - _LEFT_AFTER_S
    for path in {path for folder in folders for path in folder.glob(f"{_SCRATCH}*")}:
        with suppress(OSError):
            if path.stat().st_mtime < oldest_s:
                shutil.rmtree(path, ignore_errors=True)


def nearest(path: Path) -> Path:
    """``path``, or the nearest of its parents that is there: nothing is made for a look."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def read(path: Path) -> str:
    """The text of a file, opened anew; empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _write_speed(path: Path) -> float:
    """Bytes per second, of a sample that compresses badly, until it is on the disk."""
    sample = os.urandom(_SAMPLE_BYTES)
    start = time.perf_counter()
    path.write_bytes(sample)
    disk.sync_file(path)
    return _SAMPLE_BYTES / (time.perf_counter() - start)
