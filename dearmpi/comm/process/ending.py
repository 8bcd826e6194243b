"""How a process ends when a call may never return, or when C's exit handlers would stop it."""

from __future__ import annotations

import ctypes
import os
import threading
from types import TracebackType

from dearmpi.comm.api import safe_output
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
        safe_output.flush()
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
        safe_output.write(f"[{self._who}] {text}: {self._advice}")


def skip_exit_handlers() -> None:
    """Make a call of C's exit() end this process at once, with the same status.

    Call it right before something that calls exit(): handlers run last in, first out. Those of
    libraries destroy what other threads still compute with, which ends the process by a signal.
    Changes nothing where the C library has no on_exit(), as on macOS.
    """
    libc = ctypes.CDLL(None)
    on_exit = getattr(libc, "on_exit", None)
    if on_exit is not None:
        # _exit() itself, not a function of Python's, which would wait for the interpreter's lock.
        on_exit(libc._exit, None)
