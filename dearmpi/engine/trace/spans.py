"""Spans as they happen, for a recorder while there is one and for torch's profiler; and how long
communication took, how much of it the main thread waited for, and how many bytes it was.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType

from torch.autograd import profiler

from dearmpi.comm.api.collectives import Request
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.progress.lane import Operation
from dearmpi.plan.data.layout import Bucket
from dearmpi.span import Recorder, Span, Track
from dearmpi.torch_internals import is_profiling

_OPERATIONS = {Track.REDUCE_SCATTER: "RS", Track.ALL_GATHER: "AG", Track.UPDATE: "U"}
_UNSEEN = nullcontext()


class Spans:
    """Where the engine says what took how long; without a listener it costs a test per event.

    recorder: None, or what gets every span.
    iteration: the one under way, from 1; the training loop counts.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.iteration = 0
        self._launched: dict[int, tuple[int, float]] = {}

    def span(
        self, track: Track, name: str, *, bucket: Bucket | None = None
    ) -> AbstractContextManager[None]:
        """A context in which ``name`` happens, to ``bucket`` if one is given."""
        if self.recorder is None and not is_profiling():
            return _UNSEEN
        return _Watch(self._begin(track, name, bucket), self.recorder)

    @property
    def is_heard(self) -> bool:
        """Whether anything listens."""
        return self.recorder is not None or is_profiling()

    def codec(self, what: str, label: str, bucket: Bucket) -> AbstractContextManager[None]:
        """A context in which ``bucket`` is encoded or decoded for the operation ``label``."""
        return self.span(Track.CODEC, f"{what} {label}", bucket=bucket)

    def launched(self, bucket: Bucket) -> None:
        """The main thread submits ``bucket``: what happens to it belongs to this iteration."""
        if self.recorder is not None:
            self._launched[bucket.index] = (self.iteration, time.perf_counter())

    def update(self, bucket: Bucket) -> AbstractContextManager[None]:
        """A context in which ``bucket`` is updated."""
        if self.recorder is None and not is_profiling():
            return _UNSEEN
        return self.span(Track.UPDATE, _label(Track.UPDATE, bucket), bucket=bucket)

    def operation(self, track: Track, bucket: Bucket) -> OperationSpan | None:
        """The span of a collective on ``bucket`` that is about to be posted; None without a
        listener.
        """
        if self.recorder is None and not is_profiling():
            return None
        span = self._begin(track, _label(track, bucket), bucket)
        if track is Track.REDUCE_SCATTER and bucket.index in self._launched:
            span = span._replace(queued_s=self._launched[bucket.index][1])
        return OperationSpan(span, self.recorder)

    def _begin(self, track: Track, name: str, bucket: Bucket | None) -> Span:
        now_s = time.perf_counter()
        if bucket is None:
            return Span(track, name, now_s, now_s, self.iteration)
        iteration, _ = self._launched.get(bucket.index, (self.iteration, now_s))
        return Span(track, name, now_s, now_s, iteration, bucket.index, bucket.nbytes)


class _Watch:
    """A context whose span is recorded at its end."""

    def __init__(self, span: Span, recorder: Recorder | None) -> None:
        self._span, self._recorder = span, recorder
        self._profiled = profiled(span.name)

    def __enter__(self) -> None:
        self._profiled.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._profiled.__exit__(kind, error, trace)
        if self._recorder is not None:
            self._recorder.add(self._span._replace(stop_s=time.perf_counter()))


class OperationSpan:
    """The span of a collective, from its posting to its end."""

    def __init__(self, span: Span, recorder: Recorder | None) -> None:
        """Called right before the collective is posted."""
        self._span, self._recorder = span, recorder
        self._progress_s: float | None = None
        self._awaits_progress = self._may_wait = False
        self._profiled = profiled(f"{span.name} posted")
        self._profiled.__enter__()

    def started(self, request: Request) -> None:
        """The collective is posted, or waits for its turn behind others."""
        self._profiled.__exit__(None, None, None)
        self._awaits_progress = request.num_arrived is not None
        request.when_posted(self._note_posted)
        self._may_wait = True

    def moved(self, request: Request) -> None:
        """Something has happened to the collective."""
        if self._awaits_progress and request.num_arrived:
            self._awaits_progress = False
            self._progress_s = time.perf_counter()

    def completed(self, request: Request) -> None:
        """The collective is complete."""
        self.moved(request)
        now_s = time.perf_counter()
        with profiled(f"{self._span.name} done"):
            pass
        if self._recorder is not None:
            self._recorder.add(self._span._replace(stop_s=now_s, progress_s=self._progress_s))

    def _note_posted(self) -> None:
        if self._may_wait:  # else its span began where posting did
            self._span = self._span._replace(start_s=time.perf_counter())


def profiled(name: str) -> AbstractContextManager[object]:
    """A context that torch's profiler, if it is on, shows as ``dearmpi NAME``.

    Its ranges must nest within a thread. Collectives overlap each other, so they are shown by
    their posting and their end; those of the progress thread are seen by a profiler of all threads.
    """
    return profiler.record_function(f"dearmpi {name}") if is_profiling() else _UNSEEN


def _label(track: Track, bucket: Bucket) -> str:
    return f"{_OPERATIONS[track]}{bucket.index}"


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank sends in a step in which all parameters have gradients, in bytes.

    reduced: in reduce-scatters. gathered: in all-gathers. dense: what both would be without
    compression or half precision.
    owed_share: of the gradients to be sent in the last step, what this rank still owes, as a share
        of their squared norm; None where all was sent, or it is not known.
    fallbacks: how often so far a bucket has travelled whole, in either direction, since
        ``compress`` had nothing shorter: too many blocks, no decoding, estimates that began anew.
    """

    reduced: int = 0
    gathered: int = 0
    dense: int = 0
    owed_share: float | None = None
    fallbacks: int = 0


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
