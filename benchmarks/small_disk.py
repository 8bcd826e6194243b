"""Small disk: a file system of its own for a run folder, which can be filled up."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_BYTES = 64 << 20


def fill_up(path: Path) -> None:
    """Take all space that the file system has left."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass


@contextmanager
def small_disk(*, wanted: bool) -> Iterator[Path]:
    """A folder on a small file system of its own, if ``wanted``; else just a folder."""
    folder = Path(tempfile.mkdtemp(prefix="dear-faults-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    try:
        if wanted:
            subprocess.run(mount, check=True)
        yield folder
    finally:
        if wanted:
            subprocess.run(["umount", "-l", str(folder)], check=False)
        shutil.rmtree(folder, ignore_errors=True)
