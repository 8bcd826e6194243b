"""Spans as they happen: told to a recorder while there is one, and to torch's profiler."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from torch.autograd import profiler

from dearmpi.comm.api.collectives import Request
from dearmpi.engine.trace.span import Recorder, Span, Track
from dearmpi.plan.data.layout import Bucket
from dearmpi.torch_internals import is_profiling

_OPERATIONS = {Track.REDUCE_SCATTER: "RS", Track.ALL_GATHER: "AG", Track.UPDATE: "U"}
_UNSEEN = nullcontext()


class Spans:
    """Where the engine says what took how long; without a listener it costs a test per event.

    recorder: None, or told of every span.
    iteration: the one under way, from 1; whoever trains counts.
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
