"""Listing: what lies in a folder of data. What cannot be looked at is an error: a run that took it
for nothing would train on less, and nobody would know.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from dearmpi.errors import DataError
from dearmpi.train.files.presence import mode_of


def is_file(path: Path) -> bool:
    """Whether there is a file, or a link to one. Raises DataError where that cannot be told."""
    return stat.S_ISREG(_mode(path))


def is_folder(path: Path) -> bool:
    """Whether there is a folder, or a link to one. Raises DataError where that cannot be told."""
    return stat.S_ISDIR(_mode(path))


def folders_in(root: Path) -> list[Path]:
    """The folders in ``root`` by name, hidden ones aside. Raises DataError where it cannot be
    listed.
    """
    try:
        entries = sorted(root.iterdir())
    except OSError as error:
        raise _explain(error, root) from error
    return [path for path in entries if not path.name.startswith(".") and is_folder(path)]


def files_below(root: Path, *, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """What lies below ``root`` and is no folder, by name: what is in a folder before what is in the
    folders there. Hidden entries, and folders of the names ``skipped``, are passed over; links to
    folders are not followed.

    Raises DataError for a folder that cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise _explain(error, Path(error.filename)) from error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = sorted(n for n in folders if not n.startswith(".") and n not in skipped)
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _mode(path: Path) -> int:
    try:
        return mode_of(path)
    except OSError as error:
        raise _explain(error, path) from error


def _explain(error: OSError, path: Path) -> DataError:
    return DataError(
        f"cannot look at {path}: {error.strerror}; make it readable, or give data without it"
    )
