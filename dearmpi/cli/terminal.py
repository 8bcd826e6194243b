"""Terminal: whether a launcher writes to one, so that a line that moves is seen by somebody.

A rank cannot tell by its own output: MPICH's launcher gives it a pipe even where a terminal is at
the end, and Open MPI's gives rank 0 a terminal even where the job's output goes to a file.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_LAUNCHERS = ("mpirun", "mpiexec", "prterun", "orterun")
# With these the launcher writes something before each line.
_LABELS = ("-l", "-prepend-rank", "-prepend-pattern", "--tag-output", "--output")
_COLUMNS = 80


def launcher_terminal(pid: int, *, processes: Path = Path("/proc")) -> Path | None:
    """The terminal to which the launcher above process ``pid`` writes.

    None where it writes to none, or where nothing tells: it may run on another host.
    """
    try:
        while pid > 1:
            name, parent = _read(processes / str(pid) / "stat")
            if name.startswith(_LAUNCHERS):
                words = (processes / str(pid) / "cmdline").read_text().split("\0")
                target = Path(os.readlink(processes / str(pid) / "fd" / "1"))
                is_seen = target.is_relative_to("/dev/pts") or target.name.startswith("tty")
                return target if is_seen and not set(words) & set(_LABELS) else None
            pid = parent
    except (OSError, ValueError):
        pass
    return None


def count_columns(terminal: Path | None) -> int:
    """How wide ``terminal`` is; this process's own for None."""
    if terminal is None:
        return shutil.get_terminal_size().columns
    try:
        descriptor = os.open(terminal, os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.get_terminal_size(descriptor).columns or _COLUMNS
        finally:
            os.close(descriptor)
    except OSError:
        return _COLUMNS


def _read(stat: Path) -> tuple[str, int]:
    """A process's name and its parent; the name may hold anything, so it ends at the last ``)``."""
    before, _, after = stat.read_text().rpartition(")")
    return before.partition("(")[2], int(after.split()[1])
