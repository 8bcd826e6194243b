"""Console: what a run tells the person who started it. Rank 0 speaks; the others are silent."""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from dearmpi.train.disk import DISK_FULL

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


_REDRAW_S = 0.2
_GAP = "  "
_GONE = (errno.EPIPE, errno.EIO)  # the reader's end, or the terminal's


@dataclass(slots=True)
class Console:
    """Lines on ``out``, and where that is a terminal a line below them that is drawn anew.

    speaks: False makes it silent.
    launched: ``out`` leads to a launcher, and what counts is where that writes.
    needed: what is said is what was asked for, so that a full disk is a failure.
    out: None, as where standard output is closed, makes it silent too.
    """

    speaks: bool
    launched: bool = False
    needed: bool = False
    out: TextIO | None = field(default_factory=lambda: sys.stdout)
    _live: tuple[str, ...] = ()
    _drawn_s: float = 0.0
    _terminal: Path | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.speaks = self.speaks and self.out is not None
        if isinstance(self.out, io.TextIOWrapper):
            self.out.reconfigure(errors="replace")  # what its encoding lacks
        if self.speaks and self.launched:
            self._terminal = launcher_terminal(os.getppid())

    @property
    def is_live(self) -> bool:
        """Whether a line that moves is seen by anybody."""
        if not self.speaks or self.out is None:
            return False
        return self._terminal is not None if self.launched else self.out.isatty()

    @property
    def encoding(self) -> str:
        """That of what is written."""
        return getattr(self.out, "encoding", None) or "utf-8"

    def say(self, *lines: str) -> None:
        """Print lines."""
        if not self.speaks:
            return
        with self._heard() as out:
            self._erase(out)
            for line in lines:
                print(line, file=out)
            self._draw(out, self._live)
            out.flush()

    def show(self, *parts: str) -> None:
        """Replace the live line by as many of ``parts``, the first ones, as fit on it, as often as
        an eye can follow.
        """
        now_s = time.monotonic()
        if self.is_live and now_s - self._drawn_s >= _REDRAW_S:
            self._drawn_s = now_s
            with self._heard() as out:
                self._erase(out)
                self._draw(out, parts)
                out.flush()

    def finish(self) -> None:
        """Remove the live line."""
        if self.is_live:
            with self._heard() as out:
                self._erase(out)
                out.flush()
        self._live = ()

    @contextmanager
    def _heard(self) -> Iterator[TextIO]:
        """Where nobody listens any more, such as behind ``| head``, training need not end."""
        assert self.out is not None, "one that speaks"
        try:
            yield self.out
        except OSError as error:
            is_full = error.errno in DISK_FULL
            if not is_full and error.errno not in _GONE or is_full and self.needed:
                raise
            self.speaks = False
            # Python would try to write the rest at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.out.fileno())
            level = logging.WARNING if is_full else logging.INFO
            logging.getLogger("dearmpi").log(level, "the console is gone: %s", error)

    def _erase(self, out: TextIO) -> None:
        if self._live and self.is_live:
            out.write("\r\x1b[K")

    def _draw(self, out: TextIO, parts: tuple[str, ...]) -> None:
        self._live = parts
        if not parts or not self.is_live:
            return
        room = max(1, count_columns(self._terminal) - 1)
        text = parts[0][:room]
        for part in parts[1:]:
            if len(text) + len(_GAP) + len(part) > room:
                break  # half a figure would read as another
            text += _GAP + part
        out.write(text)


def bar(done: int, total: int, *, width: int = 24, encoding: str = "utf-8") -> str:
    """A bar of ``width`` characters that ``encoding`` has, filled as far as ``done`` of it all."""
    full, empty = "█·"
    try:
        (full + empty).encode(encoding)
    except UnicodeEncodeError:
        full, empty = "#."
    filled = width if total <= 0 else min(width, width * done // total)
    return full * filled + empty * (width - filled)


def duration(seconds: float) -> str:
    """Seconds as people read them: 45 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
