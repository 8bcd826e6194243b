"""A folder that may not be listed, or looked into; root may do both with every one, so the refusal
is played.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def refuse_to_list(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the system refuse to list ``folder``."""
    scandir = os.scandir

    def refuse(path: Any = ".") -> Any:
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)


def refuse_to_look(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the system refuse to look at anything below ``folder``."""
    stat = os.stat

    def refuse(path: Any, *args: Any, **named: Any) -> os.stat_result:
        if not isinstance(path, int) and folder in Path(os.fsdecode(path)).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *args, **named)

    monkeypatch.setattr(os, "stat", refuse)
