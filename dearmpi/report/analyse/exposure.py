"""Exposure: which bucket's communication a rank waited for, and which was hidden."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dearmpi.report.read.recording import (
    Interval,
    Recording,
    Window,
    intersect,
    spans_by_window,
    total,
    union,
)
from dearmpi.span import Span, Track

_NETWORK = (Track.REDUCE_SCATTER, Track.ALL_GATHER)


@dataclass(frozen=True, slots=True)
class BucketTime:
    """A bucket's reduce-scatter and all-gather, in seconds per iteration.

    network_s: they were in flight. exposed_s: of it, the main thread waited. Where several
    operations were in flight, each bears an equal part, so that buckets add up to the whole.
    """

    bucket: int
    network_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.network_s - self.exposed_s)


@dataclass(frozen=True, slots=True)
class Exposure:
    """What one rank waited for, in seconds per iteration.

    communication_s: something was in flight.
    first_s: for the first bucket at the boundary between two iterations, when no other bucket is
        left to reduce. idle_s: while nothing was in flight, such as for an update.
    """

    buckets: tuple[BucketTime, ...]
    communication_s: float
    first_s: float
    idle_s: float

    @property
    def waited_s(self) -> float:
        return sum(bucket.exposed_s for bucket in self.buckets) + self.idle_s


def measure_exposure(spans: Sequence[Span], windows: Sequence[Window]) -> Exposure:
    """The exposure of the rank that recorded ``spans``: means over ``windows`` (at least one)."""
    network: dict[int, float] = {}
    exposed: dict[int, float] = {}
    communication_s = first_s = idle_s = 0.0
    for window, within in zip(windows, spans_by_window(spans, windows), strict=True):
        operations = [span for span in within if span.track in _NETWORK]
        for length_s, active in _pieces((window.start_s, window.stop_s), operations):
            _share_out(length_s, active, network)
            communication_s += length_s if active else 0.0
        for wait in _waits(within, window):
            for length_s, active in _pieces(wait, operations):
                _share_out(length_s, active, exposed)
                idle_s += 0.0 if active else length_s
                first_s += length_s if _only_first(active) else 0.0
    count = len(windows)
    return Exposure(
        tuple(
            BucketTime(bucket, seconds / count, exposed.get(bucket, 0.0) / count)
            for bucket, seconds in sorted(network.items())
        ),
        communication_s / count,
        first_s / count,
        idle_s / count,
    )


def shared_wait(recording: Recording) -> float:
    """The share of the least waiting rank's waits in which all other ranks waited as well, 0 to 1.

    Then the network is what they wait for; else a rank that still computes. 1 where nothing tells.
    """
    windows = [recording.windows(rank) for rank in recording.spans]
    if not windows or not all(windows):
        return 1.0
    start_s, stop_s = max(w[0].start_s for w in windows), min(w[-1].stop_s for w in windows)
    whole = Window(0, start_s, stop_s)
    waits = [_waits(spans, whole) for spans in recording.spans.values()]
    least_s = min(map(total, waits))
    shared = waits[0]
    for others in waits[1:]:
        shared = intersect(shared, others)
    return total(shared) / least_s if least_s > 0 else 1.0


def _waits(spans: Sequence[Span], window: Window) -> list[Interval]:
    clipped = (window.clip(span) for span in spans if span.track is Track.WAIT)
    return union(interval for interval in clipped if interval is not None)


def _pieces(whole: Interval, spans: Sequence[Span]) -> Iterator[tuple[float, list[Span]]]:
    """Parts of ``whole`` during which the same spans were active: length, spans."""
    start, stop = whole
    edges = {edge for span in spans for edge in (span.start_s, span.stop_s) if start < edge < stop}
    coming = sorted(spans, key=lambda span: span.start_s, reverse=True)
    active: list[Span] = []
    for low, high in pairwise(sorted({start, stop} | edges)):
        while coming and coming[-1].start_s <= low:
            active.append(coming.pop())
        active = [span for span in active if span.stop_s > low]
        yield high - low, active


def _share_out(seconds: float, active: Sequence[Span], by_bucket: dict[int, float]) -> None:
    for span in active:
        bucket = _bucket(span)
        by_bucket[bucket] = by_bucket.get(bucket, 0.0) + seconds / len(active)


def _only_first(active: Sequence[Span]) -> bool:
    reduced = {_bucket(span) for span in active if span.track is Track.REDUCE_SCATTER}
    return any(_bucket(span) == 0 for span in active) and reduced <= {0}


def _bucket(span: Span) -> int:
    assert span.bucket is not None, f"{span.name} is no bucket's"
    return span.bucket
