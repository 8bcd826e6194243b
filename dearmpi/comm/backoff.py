"""Backoff: how long whoever polls sleeps between two looks."""

from __future__ import annotations

import time

# An idle poller yields a few times, then sleeps for a share of the time it has already waited: what
# the last sleep adds to a wait stays in proportion to it.
_NUM_YIELDS = 3
_SLEEP_SHARE = 0.05
_LEAST_SLEEP_S = 20e-6
_MOST_SLEEP_S = 1e-3


class Backoff:
    """How long to sleep between polls that found nothing."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Something happened: poll eagerly again."""
        self._num_idle = 0
        self._since = time.perf_counter()

    def next_sleep_s(self) -> float:
        """Seconds to sleep before the next poll; 0 means to yield only."""
        self._num_idle += 1
        if self._num_idle <= _NUM_YIELDS:
            return 0.0
        waited = time.perf_counter() - self._since
        return min(_MOST_SLEEP_S, max(_LEAST_SLEEP_S, waited * _SLEEP_SHARE))
