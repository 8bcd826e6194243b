"""Folder lock: one job at a time writes into a run folder."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dearmpi.errors import CheckpointError, ConfigError, DearError

_TAKEN = (errno.EACCES, errno.EAGAIN)
_CANNOT_LOCK = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


@dataclass(frozen=True, slots=True)
class FolderLock:
    """This process's hold on a run folder: the open file ``descriptor``, at ``path`` in it.

    full_path: what ``path`` was at the beginning; the working folder, too, may be removed since.
    """

    path: Path
    descriptor: int
    full_path: Path

    def check(self) -> None:
        """Raise CheckpointError if the folder is not this process's any more. Writing would not
        fail: open files outlive their names, and a name may lead elsewhere.
        """
        refused = f"cannot save in {self.path.parent}"
        try:
            is_own = os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
        except OSError as error:
            if error.errno not in _GONE:
                raise CheckpointError(
                    f"{refused}: cannot look at {self.full_path}: {error.strerror}; earlier "
                    "checkpoints are untouched. Make it reachable, and start again",
                    code="run-folder-lost",
                ) from error
            raise CheckpointError(
                f"{refused}: this job's file {self.full_path} is gone ({error.strerror}). The "
                "folder was removed or renamed, or the working folder changed; start again",
                code="run-folder-lost",
            ) from error
        if not is_own:
            raise CheckpointError(
                f"{refused}: {_read(self.path) or 'another process'} took it over while this "
                "job trained; start again with another --name",
                code="run-folder-lost",
            )


@contextmanager
def lock_folder(path: Path) -> Iterator[FolderLock]:
    """Inside, the file at ``path`` is locked by this process and names it. The system unlocks it
    when the process ends, however it ends.

    A job that SLURM has queued again takes over its own lock, since a file server may keep the lock
    of a lost node. File systems without locks are used without one.

    Raises ConfigError if another process has it, DearError if the file cannot be written.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    start = os.environ.get("SLURM_RESTART_COUNT", "0")
    try:
        full_path = path.absolute()
        descriptor = _lock(path)
        if descriptor is None:  # else reading would unlock it: to close a file is to unlock it
            occupant = _read(path)
            named = re.search(r", job (\S+), start (\S+)$", occupant)
            if named and named[1] == job and named[2] != start:
                path.unlink()
                descriptor = _lock(path)
        if descriptor is None:
            raise ConfigError(
                f"{path.parent} is in use by {occupant or 'another process'}; wait for its "
                f"end, or use another --name (if that process is gone, remove {path})",
                code="run-folder-in-use",
            )
        own = f"process {os.getpid()} on {platform.node()}" + (
            f", job {job}, start {start}" if job else ""
        )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{own}\n".encode(), 0)
    except OSError as error:
        raise DearError(f"cannot write {path}: {error.strerror}", code="cannot-write") from error
    try:
        yield FolderLock(path, descriptor, full_path)
    finally:
        os.close(descriptor)


def _lock(path: Path) -> int | None:
    """Its descriptor, or None where another process has locked it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _CANNOT_LOCK:
            return descriptor
        os.close(descriptor)
        if error.errno in _TAKEN:
            return None
        raise
    return descriptor


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
