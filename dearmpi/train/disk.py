"""Disk: what is at a path, and text that a crash leaves whole.

A path that may not be looked at is an error, not an absent file: a run would train on less data, or
report a checkpoint as missing.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from dearmpi.errors import DataError, DearError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


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
