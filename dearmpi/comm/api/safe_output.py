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

_STANDARD = (1, 2)  # what a launcher reads, whatever a script has put in place of the streams
_POLL_S = 0.001


def write(text: str, *, stream: TextIO | None = None) -> None:
    """Write lines to ``stream``, by default standard error, at once and if that can be done.

    In one piece, the last line's end included: other ranks may say something at the same time.
    """
    with contextlib.suppress(Exception):
        stream = stream or sys.stderr
        stream.write(f"{text}\n")
        stream.flush()


def flush() -> None:
    """Write out what standard output and standard error still hold, if that can be done."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def wait_until_read(*, patience_s: float = 1.0, descriptors: Iterable[int] = _STANDARD) -> None:
    """Write it out, and wait as long as that until readers of pipes have taken it.

    A launcher that hears of an abort may end the job before it has read what a rank said: hydra
    was seen to, on a busy machine.
    """
    flush()
    deadline_s = time.monotonic() + patience_s
    for descriptor in descriptors:
        while _is_unread(descriptor) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)


def _is_unread(descriptor: int) -> bool:
    """Whether ``descriptor`` is a pipe in which something waits to be read."""
    num_bytes = array.array("i", [0])
    try:
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            fcntl.ioctl(descriptor, termios.FIONREAD, num_bytes)
    except OSError:  # closed, or a system that does not tell
        return False
    return num_bytes[0] > 0
