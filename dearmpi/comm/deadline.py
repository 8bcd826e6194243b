"""Deadline: an end of this process for a call that may never return and cannot be interrupted."""

from __future__ import annotations

import os
import sys
import threading
from types import TracebackType

from dearmpi.errors import StallError


class Deadline:
    """Ends this process with StallError's exit code unless what is entered is left in time.

    limit_s: seconds between the two. complaint: printed on standard error before the end.
    The thread that does it exists from the start, since none can begin while Python shuts down;
    the call must let go of the interpreter's lock.
    """

    def __init__(self, limit_s: float, *, complaint: str) -> None:
        self._limit_s, self._complaint = limit_s, complaint
        self._entered, self._left = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="dearmpi-deadline", daemon=True).start()

    def __enter__(self) -> None:
        self._entered.set()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.set()

    def _watch(self) -> None:
        self._entered.wait()
        if self._left.wait(min(self._limit_s, threading.TIMEOUT_MAX)):
            return
        try:
            print(self._complaint, file=sys.stderr, flush=True)
            sys.stdout.flush()
        finally:  # whatever became of the streams
            os._exit(StallError.exit_code)
