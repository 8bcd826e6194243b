"""Backoff: how long whoever polls sleeps between two looks."""

from __future__ import annotations

import time

from dearmpi.comm.api import Movement

# An idle poller yields a few times, then sleeps for a share of the time it has already waited: what
# the last sleep adds to a wait stays in proportion to it.
_NUM_YIELDS = 3
_SLEEP_SHARE = 0.05
_LEAST_SLEEP_S = 20e-6
_MOST_SLEEP_S = 1e-3

# Likewise of the time since the last message of a long ring. There what each rank sleeps too long
# makes all later hops later; messages are many, so that a smaller share would cost much CPU time.
_SHARE_BETWEEN_MESSAGES = 0.5


class Backoff:
    """How long to sleep between polls that found nothing, or a message."""

    def __init__(self) -> None:
        self.note(Movement.OPERATION)

    def note(self, movement: Movement) -> None:
        """What a poll has found: after an operation's begin or end, poll eagerly again."""
        if movement is Movement.NONE:
            return
        self._num_idle = 0
        self._message_s = time.perf_counter()
        if movement is Movement.OPERATION:
            self._begin_s = self._message_s

    def next_sleep_s(self) -> float:
        """Seconds to sleep before the next poll; 0 means to yield only."""
        self._num_idle += 1
        if self._num_idle <= _NUM_YIELDS:
            return 0.0
        now = time.perf_counter()
        waited_s = _SLEEP_SHARE * (now - self._begin_s)
        between_s = _SHARE_BETWEEN_MESSAGES * (now - self._message_s)
        return min(_MOST_SLEEP_S, max(_LEAST_SLEEP_S, min(waited_s, between_s)))
