"""How a process ends when a call may never return, or when C's exit handlers would stop it."""

from __future__ import annotations

import builtins
import ctypes
import os
import sys
import threading
from types import TracebackType
from typing import ClassVar, NoReturn

from dearmpi.comm.api import safe_output
from dearmpi.comm.watchdog.watchdog import StallLimits
from dearmpi.errors import StallError

_STEP_S = 1.0


class Deadline:
    """Ends this process with ``exit_code`` if the ``with`` block lasts too long.

    limits: seconds until a warning, and until the end. origin, what, advice: "[origin] has waited
        30 s for what: advice", on standard error. exit_code: default StallError's.
    The thread that ends the process starts at once, since none can start while Python shuts down.
    A call in the block must release the interpreter's lock.
    """

    def __init__(
        self,
        limits: StallLimits,
        *,
        origin: str,
        what: str,
        advice: str,
        exit_code: int = StallError.exit_code,
    ) -> None:
        self._limits, self._origin, self._what, self._advice = limits, origin, what, advice
        self._exit_code = exit_code
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
        self._write(f"has waited {warning_s:.0f} s for {self._what}")
        if self._is_left_within(abort_s - warning_s):
            return
        self._write(f"gave up after waiting {abort_s:.0f} s for {self._what}")
        safe_output.flush()
        os._exit(self._exit_code)

    def _is_left_within(self, seconds: float) -> bool:
        """Whether the block ends within ``seconds``, without time in which the job is suspended."""
        while seconds > 0:
            step_s = min(seconds, _STEP_S)
            if self._left.wait(step_s):
                return True
            seconds -= step_s
        return False

    def _write(self, text: str) -> None:
        safe_output.write(f"[{self._origin}] {text}: {self._advice}")


class _Exit(SystemExit):
    """What ``sys.exit()`` raises. If it ends the program, it is deleted when no frame is left."""

    def __del__(self) -> None:
        is_main = threading.get_ident() == threading.main_thread().ident
        if is_main and sys._getframe().f_back is None:
            _Program.exit_status = _status_of(self.code)


class _Program:
    """The program of this process."""

    exit_status: ClassVar[int] = 0


def note_exit_status() -> None:
    """Have ``exit_status`` know with what ``sys.exit()``, or ``exit()``, ends the program.

    Python shows its exit status to no handler. A ``raise SystemExit``, and a ``sys.exit`` that a
    script has imported before, go unnoticed.
    """

    def leave_program(status: object = None, /) -> NoReturn:
        raise _Exit(status)

    leave_program.__doc__ = sys.exit.__doc__
    sys.exit = leave_program
    for name in ("exit", "quit"):  # of the module site, which may not be loaded
        quitter = getattr(builtins, name, None)
        if type(quitter).__module__ == "_sitebuiltins":
            setattr(type(quitter), "__call__", lambda _, code=None: leave_program(code))  # noqa: B010


def exit_status() -> int:
    """The status with which ``sys.exit()`` has ended the program; 0 if it has not, or with 0."""
    return _Program.exit_status


def _status_of(code: object) -> int:
    """The exit status that Python makes of the ``code`` of a SystemExit."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def skip_exit_handlers() -> None:
    """Make a call of C's exit() end this process at once, with the same status.

    Call it right before a call of exit(): handlers run last in, first out. Handlers of libraries
    destroy data that other threads still use, and the process would end by a signal. Changes
    nothing where the C library has no on_exit(), as on macOS.
    """
    libc = ctypes.CDLL(None)
    on_exit = getattr(libc, "on_exit", None)
    if on_exit is not None:
        # _exit() itself; a Python function would wait for the interpreter's lock.
        on_exit(libc._exit, None)
