"""Presence: what is at a path. What may not be looked at is an error, and not taken for nothing:
people would be told that something is gone which is there, and its mode wrong.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dearmpi.errors import DearError


def is_folder(path: Path, error: type[DearError]) -> bool:
    """Whether there is a folder, or a link to one. Raises ``error`` where that cannot be told."""
    return stat.S_ISDIR(_look(path, error))


def is_there(path: Path, error: type[DearError]) -> bool:
    """Whether there is anything. Raises ``error`` where that cannot be told."""
    return _look(path, error) != 0


def mode_of(path: Path) -> int:
    """As stat has it, 0 for what is not there. Raises OSError for what may not be looked at.

    Not by Path.is_dir and its like, which say no of that, or fail, as Python's version has it.
    """
    found = _find(path)
    return 0 if found is None else found.st_mode


def file_bytes(path: Path) -> int | None:
    """The size of the file, or of that to which a link leads; None where there is none. Raises
    OSError for what may not be looked at.
    """
    found = _find(path)
    return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None


def _find(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # such as a link that leads nowhere
        return None


def _look(path: Path, error: type[DearError]) -> int:
    try:
        return mode_of(path)
    except OSError as failure:
        raise error(
            f"cannot look at {path.absolute()}: {failure.strerror}; the folders above it must be "
            "readable for this user, on every host"
        ) from failure
