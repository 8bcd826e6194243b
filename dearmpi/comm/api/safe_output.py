"""Output that must not keep a process from ending, such as what it writes before it ends.

Streams may be closed, full, without a reader, or replaced by a script.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import stat
import sys
import termios
import time
from collections.abc import Iterable
from typing import TextIO

_STANDARD = (1, 2)  # a launcher reads these, even if a script has replaced the streams
_POLL_S = 0.001


def write(text: str, *, stream: TextIO | None = None) -> None:
    """Write ``text`` and a line end to ``stream`` and flush it; ignore failures.

    stream: default standard error. The text goes out in one piece, since other ranks may write at
        the same time.
    """
    with contextlib.suppress(Exception):
        stream = stream or sys.stderr
        stream.write(f"{text}\n")
        stream.flush()


def flush() -> None:
    """Flush standard output and standard error; ignore failures."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def wait_until_read(*, patience_s: float = 1.0, descriptors: Iterable[int] = _STANDARD) -> None:
    """Flush, and wait up to ``patience_s`` until the readers of pipes have read everything.

    A launcher may end an aborting job before it has read the output of a rank; hydra does so on a
    busy machine.
    """
    flush()
    deadline_s = time.monotonic() + patience_s
    for descriptor in descriptors:
        while _is_unread(descriptor) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)


def _is_unread(descriptor: int) -> bool:
    """Whether ``descriptor`` is a pipe with unread bytes."""
    num_bytes = array.array("i", [0])
    try:
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            fcntl.ioctl(descriptor, termios.FIONREAD, num_bytes)
    except OSError:  # closed, or not supported by the system
        return False
    return num_bytes[0] > 0
