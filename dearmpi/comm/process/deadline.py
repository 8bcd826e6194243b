"""Deadline: an end of this process for a call that may never return and cannot be interrupted."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from dearmpi.comm.watchdog import last_words
from dearmpi.comm.watchdog.watchdog import StallLimits
from dearmpi.errors import StallError

_STEP_S = 1.0


class Deadline:
    """Says that what is entered lasts too long, then ends this process with StallError's code.

    limits: seconds until the one and the other. who, what, advice: "[who] has waited 30 s for
    what: advice", on standard error.
    The thread that does it exists from the start, since none can begin while Python shuts down;
    the call must let go of the interpreter's lock.
    """

    def __init__(self, limits: StallLimits, *, who: str, what: str, advice: str) -> None:
        self._limits, self._who, self._what, self._advice = limits, who, what, advice
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
        warning_s, abort_s = self._limits.warning_s, self._limits.abort_s
        if self._is_left_within(warning_s):
            return
        self._say(f"has waited {warning_s:.0f} s for {self._what}")
        if self._is_left_within(abort_s - warning_s):
            return
        self._say(f"gave up after waiting {abort_s:.0f} s for {self._what}")
        last_words.flush()
        os._exit(StallError.exit_code)

    def _is_left_within(self, seconds: float) -> bool:
        """Counted in small steps: a job that a scheduler suspends has waited no longer for it."""
        while seconds > 0:
            step_s = min(seconds, _STEP_S)
            if self._left.wait(step_s):
                return True
            seconds -= step_s
        return False

    def _say(self, text: str) -> None:
        last_words.say(f"[{self._who}] {text}: {self._advice}")
