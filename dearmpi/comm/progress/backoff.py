"""Backoff: how a polling thread leaves the cores to threads that compute."""

from __future__ import annotations

import contextlib
import os
import time

from dearmpi.comm.api.collectives import Movement

# An idle poller yields a few times, then sleeps for a share of the time it has already waited, so
# that the last sleep adds only this share to a wait.
_NUM_YIELDS = 3
_SLEEP_SHARE = 0.05
_LEAST_SLEEP_S = 20e-6
_MOST_SLEEP_S = 1e-3

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
        waited_s = _SLEEP_SHARE * (now - self._begin_s)
        message_s = _SHARE_OF_MESSAGE * max(self._message_s, now - self._moved_s)
        return min(_MOST_SLEEP_S, max(_LEAST_SLEEP_S, min(waited_s, message_s)))
