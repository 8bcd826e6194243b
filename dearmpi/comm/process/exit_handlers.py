"""Exit handlers: what C's exit() runs, and how a process that fails leaves it out."""

from __future__ import annotations

import ctypes


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
