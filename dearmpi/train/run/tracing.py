"""Tracing: records some iterations of a job, and costs nothing in the others."""

from __future__ import annotations

import time
from typing import Protocol

from dearmpi.comm.clock_offset import ClockOffset, measure_clock
from dearmpi.engine.setup.self_planning import MOST_STEPS, NUM_PROFILED, NUM_WARMUP
from dearmpi.engine.trace.layers import LayerSpans
from dearmpi.engine.trace.span import Recorder, Span
from dearmpi.train.loop.job import Job
from dearmpi.train.run.planning import NUM_TRIALS, STEPS_PER_TRIAL


class TraceFile(Recorder, Protocol):
    """The file of spans: ``begin`` sets the clock, ``flush`` is called between iterations.

    clock: of times that are counted from ``origin_s`` on.
    """

    def begin(self, clock: ClockOffset, origin_s: float) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Tracing:
    """Records the iterations ``window`` of ``job``: the first, and the one before which it stops.

    The all-gathers of the last one run during the one after it, and are recorded too.
    """

    def __init__(self, job: Job, window: tuple[int, int], file: TraceFile) -> None:
        self._job = job
        self._start, self._stop = window
        self._file = file
        self._layers: LayerSpans | None = None
        self._recording = False

    def begin_iteration(self, iteration: int) -> None:
        """Iteration number ``iteration``, from 1, comes next (collective at the first one)."""
        spans = self._job.optimizer.spans
        spans.iteration = iteration
        if self._start <= iteration < self._stop and not self._recording:
            self._begin()
        if not self._recording:
            return
        spans.recorder = self
        self._file.flush()
        if iteration >= self._stop:
            self._detach()
        if iteration > self._stop:
            self.close()

    def add(self, span: Span) -> None:
        """Record ``span`` if it belongs to the iterations that are wanted."""
        if span.iteration < self._stop:
            self._file.add(span)

    def close(self) -> None:
        """Stop recording. Safe to call twice."""
        self._detach()
        self._job.optimizer.spans.recorder = None
        self._recording = False
        self._file.close()

    def _begin(self) -> None:
        origin_s = time.perf_counter()
        self._file.begin(measure_clock(self._job.world, origin_s=origin_s), origin_s)
        self._layers = LayerSpans(self._job.task.model, self._job.optimizer.spans)
        self._recording = True

    def _detach(self) -> None:
        if self._layers is not None:
            self._layers.remove()
            self._layers = None


def why_untraceable(window: tuple[int, int], job: Job) -> str:
    """Empty, unless ``job`` takes none of the iterations in ``window``, or lays out its buckets
    anew in between.
    """
    first, last = job.start_step + 1, job.total_steps
    start, stop = window
    if start > last or stop <= first:
        return (
            f"trace is {start}:{stop}, but this run takes the iterations {first} to {last}; "
            "choose some of them"
        )
    if job.world.size == 1:
        return ""
    searched = job.start_step + NUM_TRIALS * STEPS_PER_TRIAL
    if job.settings.plan == "bayes" and start <= searched:
        return (
            f"trace is {start}:{stop}, but plan bayes tries buckets until iteration {searched}; "
            f"record from {searched + 1} on"
        )
    measured = job.start_step + NUM_WARMUP + NUM_PROFILED  # a plan may be taken up after this one
    planned = job.start_step + MOST_STEPS
    if job.optimizer.is_planning and start <= planned and stop > measured + 1:
        return (
            f"trace is {start}:{stop}, but plan auto lays out other buckets between iterations "
            f"{measured + 1} and {planned + 1}; record {planned + 1}:{planned + 1 + stop - start}, "
            f"or end at {measured + 1}"
        )
    return ""
