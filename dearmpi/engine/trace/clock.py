"""How long communication took, and how much of it the main thread waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dearmpi.comm.api.collectives import Request
from dearmpi.engine.trace.span import Track
from dearmpi.engine.trace.spans import Spans


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """One iteration, from step to step, in seconds.

    exposed_s: the main thread waited for communication.
    communication_s: at least one collective was on the network; on its way there it may have
        waited for a device, which does not count.
    """

    exposed_s: float = 0.0
    communication_s: float = 0.0

    @property
    def hidden_share(self) -> float:
        """The share of communication that computation covered, 0 to 1; 1 if there was none."""
        if self.communication_s <= 0:
            return 1.0
        return max(0.0, 1.0 - self.exposed_s / self.communication_s)


class CommunicationClock:
    """Adds up both; the main thread waits, the driving thread posts and finishes."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._exposed_s = 0.0
        self._busy_s = 0.0
        self._num_in_flight = 0
        self._busy_since = 0.0
        self._last = (0.0, 0.0)
        self._is_waiting = False

    def post(self, start: Callable[[], Request]) -> Request:
        """``start`` a collective, which counts from where it is posted."""
        request = start()
        request.when_posted(self._posted)
        return request

    def _posted(self) -> None:
        if self._num_in_flight == 0:
            self._busy_since = time.perf_counter()
        self._num_in_flight += 1

    def completed(self) -> None:
        """A collective is complete."""
        self._num_in_flight -= 1
        if self._num_in_flight == 0:
            self._busy_s += time.perf_counter() - self._busy_since

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Inside, the main thread waits for ``what``."""
        if self._is_waiting:  # a signal handler, in the middle of a wait, which counts both
            yield
            return
        start = time.perf_counter()
        try:
            self._is_waiting = True
            with self._spans.span(Track.WAIT, what):
                yield
        finally:
            self._is_waiting = False
            self._exposed_s += time.perf_counter() - start

    @property
    def waited_s(self) -> float:
        """How long the main thread has waited in all."""
        return self._exposed_s

    def lap(self) -> IterationTimes:
        """The times since the last lap."""
        now = (self._exposed_s, self._busy_s)
        exposed_s, communication_s = now[0] - self._last[0], now[1] - self._last[1]
        self._last = now
        return IterationTimes(exposed_s, communication_s)
