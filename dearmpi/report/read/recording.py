"""Recording: the spans of some iterations of a run, by rank, as its trace holds them."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any

from dearmpi.report.read.trace import Event, Traces
from dearmpi.report.read.trace_writer import SLOT_STRIDE
from dearmpi.span import Span, Track

Interval = tuple[float, float]


def union(intervals: Iterable[Interval], *, gap_s: float = 0.0) -> list[Interval]:
    """What at least one of them covers, in order; gaps of up to ``gap_s`` are closed."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1] + gap_s:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def subtract(intervals: Iterable[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """What is left of ``intervals`` outside of ``holes``, which are in order and apart."""
    left = []
    highs = [high for _, high in holes]
    for start, stop in intervals:
        for place in range(bisect_right(highs, start), len(holes)):
            low, high = holes[place]
            if low >= stop:
                break
            if low > start:
                left.append((start, low))
            start = high
        if start < stop:
            left.append((start, stop))
    return left


def intersect(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What both cover; each of them is in order and apart."""
    return subtract(some, subtract(some, others))


def total(intervals: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)


_OF_BUCKETS = (Track.REDUCE_SCATTER, Track.ALL_GATHER)
_MAIN_THREAD = (Track.COMPUTE, Track.WAIT, Track.DATA)


@dataclass(frozen=True, slots=True)
class Recording:
    """Spans of each rank, all on one clock.

    hosts: by rank. bucket_bytes: by bucket; empty where not known. world_size: ranks of the run,
    which may not all have left spans. notes: what is missing or
    could not be read, in words.
    """

    spans: Mapping[int, tuple[Span, ...]] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)
    bucket_bytes: tuple[int, ...] = ()
    schedule: str = ""
    world_size: int = 0
    notes: tuple[str, ...] = ()

    def windows(self, rank: int) -> tuple[Window, ...]:
        """The iterations that ``rank`` recorded from end to end.

        One reaches from where its main thread begins, with data or the wait for the first layers,
        to where the next one begins. It holds the forward with the all-gathers of the iteration
        before, the backprop with its own reduce-scatters, and the step. The first recorded
        iteration lacks those all-gathers and does not count. The last one, whose successor is not
        recorded, counts alone where there is no other: it ends with its last span.
        """
        begins: dict[int, float] = {}
        ends: dict[int, float] = {}
        trained: dict[int, float] = {}  # the end of backprop
        for span in self.spans[rank]:
            if span.track in _MAIN_THREAD:
                number = span.iteration
                begins[number] = min(span.start_s, begins.get(number, span.start_s))
                ends[number] = max(span.stop_s, ends.get(number, span.stop_s))
                if span.track is Track.COMPUTE and span.name.startswith("B"):
                    trained[number] = max(span.stop_s, trained.get(number, span.stop_s))
        for number in begins.keys() & {before + 1 for before in trained}:
            begins[number] = max(begins[number], trained[number - 1])  # times are rounded
        numbers = sorted(number for number in trained if number - 1 in begins)
        whole = (Window(n, begins[n], begins[n + 1]) for n in numbers if n + 1 in begins)
        found = tuple(window for window in whole if window.length_s > 0)
        return found or tuple(Window(n, begins[n], ends[n]) for n in numbers[-1:])

    def typical(self) -> Window | None:
        """Of the iterations that all ranks recorded, the one of median length.

        It reaches from where the last rank begins to where the last begins the next. So no rank
        shows the backprop of the iteration before.
        """
        by_rank = [{w.iteration: w for w in self.windows(rank)} for rank in self.spans]
        shared = set.intersection(*map(set, by_rank)) if by_rank else set()
        spanning = [
            Window(
                number,
                max(windows[number].start_s for windows in by_rank),
                max(windows[number].stop_s for windows in by_rank),
            )
            for number in sorted(shared)
        ]
        # Where clocks are far apart, none may be left.
        spanning = sorted((w for w in spanning if w.length_s > 0), key=lambda w: w.length_s)
        return spanning[(len(spanning) - 1) // 2] if spanning else None


@dataclass(frozen=True, slots=True)
class Window:
    """From when to when an iteration lasted, in seconds on the recording's clock."""

    iteration: int
    start_s: float
    stop_s: float

    @property
    def length_s(self) -> float:
        return self.stop_s - self.start_s

    def clip(self, span: Span) -> Interval | None:
        """The part of ``span`` that lies within, as (start, stop); None where it does not."""
        start_s, stop_s = max(span.start_s, self.start_s), min(span.stop_s, self.stop_s)
        return (start_s, stop_s) if stop_s > start_s else None

    def passes(self, spans: Iterable[Span]) -> list[tuple[str, Interval]]:
        """The feed-forwards (``F``) and backprops (``B``) within, in order.

        Each reaches from its first layer to its last: what lies between layers is computation too.
        """
        computed = sorted(
            (part, span.name[:1])
            for span in spans
            if span.track is Track.COMPUTE and (part := self.clip(span))
        )
        found = []
        for kind, group in groupby(computed, key=lambda pair: pair[1]):
            parts = [part for part, _ in group]
            if kind in ("F", "B"):
                found.append((kind, (parts[0][0], max(stop for _, stop in parts))))
        return found


def spans_by_window(spans: Iterable[Span], windows: Sequence[Window]) -> list[list[Span]]:
    """What reaches into each of ``windows``, in the order of ``spans``."""
    found: list[list[Span]] = [[] for _ in windows]
    places = sorted(range(len(windows)), key=lambda place: windows[place].start_s)
    starts_s = [windows[place].start_s for place in places]
    # Windows follow each other unless a trace is damaged: up to here, none ends later.
    ends_s = list(accumulate((windows[place].stop_s for place in places), max))
    for span in spans:
        nearest = bisect_left(starts_s, span.stop_s) - 1
        while nearest >= 0 and ends_s[nearest] > span.start_s:
            if windows[places[nearest]].clip(span):
                found[places[nearest]].append(span)
            nearest -= 1
    return found


def record(traces: Traces) -> Recording:
    """What ``traces`` hold; events that are no spans of dearmpi are passed over."""
    spans = {}
    hosts = {}
    plan: Mapping[str, Any] = {}
    for trace in traces.traces:
        found = (_span(event) for event in trace.aligned())
        spans[trace.rank] = tuple(span for span in found if span is not None)
        facts = {e["name"]: e.get("args") for e in trace.events if e["ph"] == "M"}
        hosts[trace.rank] = str(_mapping(facts.get("run")).get("host", ""))
        plan = plan or _mapping(facts.get("plan"))
    return Recording(
        spans=spans,
        hosts=hosts,
        bucket_bytes=_sizes(plan.get("bucket_bytes")),
        schedule=str(plan.get("schedule", "")),
        world_size=traces.traces[0].world_size,
        notes=traces.notes,
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _sizes(values: object) -> tuple[int, ...]:
    sizes = values if isinstance(values, list) else []
    return tuple(sizes) if all(type(size) is int and size >= 0 for size in sizes) else ()


def _span(event: Event) -> Span | None:
    try:
        if event["ph"] != "X":
            return None
        track = Track(event["tid"] % SLOT_STRIDE)
        start_s, length_s = event["ts"] / 1e6, event["dur"] / 1e6
        args = event["args"]
        if track in _OF_BUCKETS and type(args["bucket"]) is not int:
            return None
        if type(args["iteration"]) is not int or not 0 <= length_s < math.inf:
            return None
        queued_us = args.get("queued_us")
        return Span(
            track,
            str(event["name"]),
            start_s,
            start_s + length_s,
            args["iteration"],
            args.get("bucket"),
            queued_s=None if queued_us is None else start_s - queued_us / 1e6,
        )
    except (KeyError, TypeError, ValueError):
        return None
