"""How long communication took, and how much of it the main thread waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.progress.lane import Operation
from dearmpi.engine.trace.span import Track
from dearmpi.engine.trace.spans import OperationSpan, Spans
from dearmpi.plan.data.layout import Bucket


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
    """Adds up both; the main thread waits, the progress thread posts and finishes."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._exposed_s = 0.0
        self._busy_s = 0.0
        self._num_in_flight = 0
        self._busy_since = 0.0
        self._last = (0.0, 0.0)
        self._is_waiting = False

    def watch(self, *, reduces: Channel, gathers: Channel) -> None:
        """Count, and trace, all collectives of buckets on these channels from now on."""
        reduces.observe(LaneTimer(Track.REDUCE_SCATTER, self, self._spans))
        gathers.observe(LaneTimer(Track.ALL_GATHER, self, self._spans))

    def posted(self) -> None:
        """A collective is on the network."""
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


class LaneTimer:
    """``Observer`` of a lane whose collectives of buckets are spans of ``track``."""

    def __init__(self, track: Track, clock: CommunicationClock, spans: Spans) -> None:
        self._track, self._clock, self._spans = track, clock, spans
        self._under_way: dict[Operation, OperationSpan] = {}

    def starting(self, operation: Operation) -> None:
        """Begin its span."""
        if isinstance(operation.subject, Bucket):
            span = self._spans.operation(self._track, operation.subject)
            if span is not None:
                self._under_way[operation] = span

    def started(self, operation: Operation) -> None:
        """Count it from where it is on the network."""
        assert operation.request is not None
        if isinstance(operation.subject, Bucket):
            operation.request.when_posted(self._clock.posted)
            if operation in self._under_way:
                self._under_way[operation].started(operation.request)

    def moved(self, operation: Operation) -> None:
        """Note the first part of it that arrives."""
        if operation in self._under_way:
            assert operation.request is not None
            self._under_way[operation].moved(operation.request)

    def completed(self, operation: Operation) -> None:
        """End its span."""
        if isinstance(operation.subject, Bucket):
            self._clock.completed()
            if (span := self._under_way.pop(operation, None)) is not None:
                assert operation.request is not None
                span.completed(operation.request)
