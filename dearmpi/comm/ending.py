"""Ending: one thread of a process ends the job. Others that would end it, or the program, let it.

A program that reaches its end meanwhile would end this process with status 0, and a scheduler would
take the job for a success.
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import time

_PATIENCE_S = 15.0  # more than an abort takes
_POLL_S = 0.1


class Ending:
    """Which thread ends the job, and with which exit status.

    Has no lock: a signal handler may abort in the middle of an abort on the same thread.
    """

    def __init__(self) -> None:
        self._claims: list[tuple[int, int]] = []  # thread and status; the first counts

    def begin(self, code: object) -> int:
        """The exit status for ``code``, in the first thread that calls; does not return in others.

        Never 0, which would report success: a code that the system would cut to 0 counts as 1, and
        so does what is no whole number.
        """
        try:
            status = operator.index(code) & 0xFF  # type: ignore[arg-type]
        except TypeError:
            status = 1
        self._claims.append((threading.get_ident(), status or 1))
        self.wait_for_others()
        return self._claims[0][1]

    def wait_for_others(self) -> None:
        """Return unless another thread ends the job; this process ends then."""
        if not self._claims or self._claims[0][0] == threading.get_ident():
            return
        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s:
            with contextlib.suppress(BaseException):  # of a signal's handler
                time.sleep(_POLL_S)
        os._exit(self._claims[0][1])
