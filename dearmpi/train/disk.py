"""Disk: what is at a path, text that a crash leaves whole, and a folder for one job at a time.

A path that may not be looked at is an error, not an absent file: a run would train on less data, or
report a checkpoint as missing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dearmpi.errors import CheckpointError, ConfigError, DataError, DearError
from dearmpi.plan.data.fields import regular_file

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def unwritable(path: Path | str, error: OSError) -> CheckpointError:
    """What to raise for a file of a run that cannot be written."""
    if error.errno in DISK_FULL:
        return CheckpointError(
            f"cannot write {path}: {error.strerror}; free space there, or use another run folder",
            code="disk-full",
        )
    return CheckpointError(
        f"cannot write {path}: {error.strerror}; make the run folder writable, or choose another",
        code="cannot-write",
    )


def is_file(path: Path, error: type[DearError]) -> bool:
    """Whether there is a file, or a link to one. Raises ``error`` for an unreadable path."""
    return stat.S_ISREG(_look(path, error))


def is_folder(path: Path, error: type[DearError]) -> bool:
    """Whether there is a folder, or a link to one. Raises ``error`` for an unreadable path."""
    return stat.S_ISDIR(_look(path, error))


def is_there(path: Path, error: type[DearError]) -> bool:
    """Whether anything is at ``path``. Raises ``error`` for an unreadable path."""
    return _look(path, error) != 0


def mode_of(path: Path) -> int:
    """The mode from ``stat``, 0 for an absent file. Raises OSError for an unreadable path.

    ``Path.is_dir`` returns False or raises there, depending on the version of Python.
    """
    found = _find(path)
    return 0 if found is None else found.st_mode


def file_bytes(path: Path) -> int | None:
    """The size in bytes of the file, or of a link's target; None where there is none. Raises
    OSError for an unreadable path.
    """
    found = _find(path)
    return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None


def folders_in(root: Path) -> list[Path]:
    """The folders in ``root`` by name, hidden ones aside. Raises DataError where it cannot be
    listed.
    """
    try:
        entries = sorted(root.iterdir())
    except OSError as error:
        raise _unreadable(root, error, DataError) from error
    return [
        path for path in entries if not path.name.startswith(".") and is_folder(path, DataError)
    ]


def files_below(root: Path, *, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """What lies below ``root`` and is no folder, by name: what is in a folder before what is in the
    folders there. Hidden entries, and folders of the names ``skipped``, are passed over; links to
    folders are not followed.

    Raises DataError for a folder that cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error, DataError) from error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = sorted(n for n in folders if not n.startswith(".") and n not in skipped)
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _find(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # such as a link that leads nowhere
        return None


def _look(path: Path, error: type[DearError]) -> int:
    try:
        return mode_of(path)
    except OSError as failure:
        raise _unreadable(path, failure, error) from failure


def _unreadable(path: Path, failure: OSError, error: type[DearError]) -> DearError:
    return error(
        f"cannot look at {path.absolute()}: {failure.strerror}; the folders above it must be "
        "readable for this user, on every host",
        code="unreadable-file",
    )


def sync_file(path: Path) -> None:
    """Force the content of the file at ``path`` onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Force the names in the folder at ``path`` onto the disk, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no fsync of folders; their renames are synchronous.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace the file at ``path`` by ``text`` (UTF-8): a reader sees the old or the new one.

    Raises OSError with the old file untouched, for instance when the disk is full.
    """
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


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

    A job that SLURM has queued again, or ``dear-train restart`` has started again, takes over its
    own lock: a file server may keep that of a lost host. File systems without locks are used
    without one.

    Raises ConfigError if another process has it, CheckpointError if the file cannot be written.
    """
    own = f"process {os.getpid()} on {platform.node()}{_job_and_start(os.environ)}"
    try:
        full_path = path.absolute()
        descriptor = _lock(path)
        if descriptor is None:  # else reading would unlock it: to close a file is to unlock it
            occupant = _read(path)
            if _is_earlier_start(occupant, own):
                path.unlink()
                descriptor = _lock(path)
        if descriptor is None:
            raise ConfigError(
                f"{path.parent} is in use by {occupant or 'another process'}; wait for its "
                f"end, or use another --name (if that process is gone, remove {path})",
                code="run-folder-in-use",
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{own}\n".encode(), 0)
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        yield FolderLock(path, descriptor, full_path)
    finally:
        os.close(descriptor)


def _job_and_start(environment: Mapping[str, str]) -> str:
    """What tells a start of SLURM, or of ``dear-train restart``, from another of the same job."""
    text = ""
    for word, number, start in (
        ("job", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
        ("restarted", "DEARMPI_JOB", "DEARMPI_START"),
    ):
        if environment.get(number):
            text += f", {word} {environment[number]}, start {environment.get(start, '0')}"
    return text


def _is_earlier_start(occupant: str, own: str) -> bool:
    """Whether both, as ``lock_folder`` writes them, are of one job, ``occupant`` started before."""
    theirs, ours = (
        {job: int(start) for job, start in re.findall(r", (\w+ \S+), start (\d+)(?=,|$)", text)}
        for text in (occupant, own)
    )
    return any(theirs[job] < ours[job] for job in theirs.keys() & ours.keys())


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
        return regular_file(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
