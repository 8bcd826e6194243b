"""A folder that may not be listed; root may list every one, so the refusal is played."""

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
