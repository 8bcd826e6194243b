"""Sleeping: how a polling thread leaves the cores to threads that compute, how a waiting thread is
woken, and waits that could never end.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

from dearmpi.comm.api.call import signal_handled
from dearmpi.comm.api.collectives import Movement
from dearmpi.errors import CommError

# An idle poller yields a few times, then sleeps for a share of the time it has already waited, so
# that the last sleep adds only this share to a wait. Each poll costs 50 us of a core.
_NUM_YIELDS = 3
_SLEEP_SHARE = 0.07
_LEAST_SLEEP_S = 20e-6
_MOST_SLEEP_S = 2e-3

# While messages come in, the first sleeps take a share of what a message does: an operation that
# has just begun has nothing to find before its first one.
_SHARE_AT_FIRST = 0.1

# It sleeps no more than half of the time of a ring's message: longer, the wire would run out of
# messages, and each hop of a long ring would delay all later hops.
_SHARE_OF_MESSAGE = 0.5
_WEIGHT_OF_LAST = 0.25


_NICENESS = 5  # of the progress thread


def yield_to_computation() -> None:
    """Lower the calling thread's priority, so that it interrupts no thread that computes (Linux).

    It still gets a core soon, since it hardly uses any. A scheduling policy that the process has
    set itself stays.
    """
    with contextlib.suppress(AttributeError, OSError):  # other systems, or not allowed
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            niceness = max(os.getpriority(os.PRIO_PROCESS, 0), _NICENESS)
            os.setpriority(os.PRIO_PROCESS, 0, niceness)


class Backoff:
    """How long to sleep between polls that found nothing, or a message."""

    def __init__(self) -> None:
        self._message_s = _LEAST_SLEEP_S  # mean time between the last messages
        self._begin_s = self._moved_s = 0.0
        self.note(Movement.OPERATION)

    def note(self, movement: Movement) -> None:
        """Take in what a poll has found; after an operation's begin or end, poll eagerly again."""
        if movement is Movement.NONE:
            return
        now = time.perf_counter()
        if movement is Movement.OPERATION:
            self._num_idle = 0
            self._begin_s = now
        else:
            # A mean of rates: a wait for a late rank hardly changes it.
            each_s = max(now - self._moved_s, _LEAST_SLEEP_S)
            rate = (1 - _WEIGHT_OF_LAST) / self._message_s + _WEIGHT_OF_LAST / each_s
            self._message_s = 1 / rate
        self._moved_s = now

    def next_sleep_s(self) -> float:
        """Seconds to sleep before the next poll; 0 means to yield only."""
        self._num_idle += 1
        if self._num_idle <= _NUM_YIELDS:
            return 0.0
        now = time.perf_counter()
        waited_s = max(_SLEEP_SHARE * (now - self._begin_s), _SHARE_AT_FIRST * self._message_s)
        message_s = _SHARE_OF_MESSAGE * max(self._message_s, now - self._moved_s)
        return min(_MOST_SLEEP_S, max(_LEAST_SLEEP_S, min(waited_s, message_s)))


class Bell:
    """A ring that comes before the wait ends it at once; several rings count as one.

    Not a condition: a handler that interrupts the holder of its lock would wait for ever.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake the thread that waits, or the next one that does."""
        try:
            self._lock.release()
        except RuntimeError:  # it was rung before
            return

    def wait(self, timeout_s: float | None) -> None:
        """Return after a ring, or after ``timeout_s``; None stands for ever."""
        self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s)


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
