"""Last words: what a process says before it ends, which must not keep it from ending.

Streams may be closed, full, without a reader, or what a script has put in their place.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO


def say(text: str, *, stream: TextIO | None = None) -> None:
    """Write lines to ``stream``, by default standard error, at once and if that can be done."""
    with contextlib.suppress(Exception):
        print(text, file=stream or sys.stderr, flush=True)


def flush() -> None:
    """Write out what standard output and standard error still hold, if that can be done."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
