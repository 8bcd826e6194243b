"""Refusal: waits that could never end, found before they begin."""

from __future__ import annotations

import os

from dearmpi.comm.api.stack import signal_handled
from dearmpi.errors import CommError


def deadlock_of(origin: str, what: str) -> CommError:
    """The error of a thread that waits for ``what``, which only this thread can complete."""
    if handled := signal_handled():
        return CommError(
            f"deadlock: on {origin} the handler of {handled} interrupted communication "
            f"and waits for {what}, but with progress='poll' only the interrupted thread can "
            "complete it. Let the handler set a flag, and read parameters after the step, or "
            "use progress='thread'",
            code="wait-in-signal-handler",
        )
    return CommError(
        f"deadlock: on {origin} the progress thread waits for {what}, which only this "
        "thread can complete. The optimizer's step runs there and must not read parameters "
        "through the model: read those of its param groups. Nor may a finalizer (__del__), "
        "which Python runs on any thread",
        code="wait-on-progress-thread",
    )


def check_process(process: int, origin: str, what: str) -> None:
    """Raise CommError in a fork of ``process``, where nothing completes ``what``."""
    if os.getpid() != process:
        raise CommError(
            f"a process that was forked from {origin} waits for {what}, but a fork has "
            "no communication. Call optimizer.synchronize() before the fork, and train in "
            "processes that are started anew",
            code="wait-in-fork",
        )
