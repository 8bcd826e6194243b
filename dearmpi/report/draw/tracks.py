"""Tracks: an iteration over time, its computation and its network, one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dearmpi.plan.data.plan import Plan
from dearmpi.plan.simulate.timeline import Timeline
from dearmpi.report.analyse.replica import replica_spans
from dearmpi.report.draw.shape import (
    Anchor,
    Axis,
    Box,
    Key,
    Label,
    Line,
    Picture,
    Shape,
    bucket_colour,
    draw_legend,
    label_within,
    on_bucket_colour,
    text_width,
    tick_step,
    tick_text,
)
from dearmpi.report.draw.units import count_text, time_text, time_unit
from dearmpi.report.read.recording import Interval, Window, subtract, total, union
from dearmpi.span import Span, Track

_ROW, _BETWEEN, _HEAD, _TAIL = 22.0, 4.0, 20.0, 12.0
_NAMES = ("compute", "reduce-scatter", "all-gather")
_TOUCH_S = 2e-6  # times in traces are rounded
_SHORT_NAMES = ("compute", "reduce", "gather")
_KEYS = (
    Key("feed-forward", "feed-forward"),
    Key("backprop", "backprop"),
    Key("waits for communication", "lost", hatched=True),
)
_PASSES = {"F": "feed-forward", "B": "backprop"}
_BESIDES = {
    Track.DATA: Key("loads data", "data"),
    Track.CHECKPOINT: Key("saves a checkpoint", "ink"),
}


@dataclass(frozen=True, slots=True)
class TrackGroup:
    """One rank's spans. window: what is shown of them. note: said at its right end."""

    label: str
    spans: tuple[Span, ...]
    window: Window
    note: str = ""

    def parts(self, track: Track) -> list[tuple[Span, Interval]]:
        """The spans of ``track`` in order, with what the window shows of them, from its start."""
        origin = self.window.start_s
        found = [
            (span, (part[0] - origin, part[1] - origin))
            for span in self.spans
            if span.track is track and (part := self.window.clip(span))
        ]
        return sorted(found, key=lambda pair: pair[1])


def draw_tracks(name: str, title: str, groups: Sequence[TrackGroup], *, width: float) -> Picture:
    """``groups`` (at least one), each from the start of its own window, on one scale."""
    narrow = width < 600
    names = _SHORT_NAMES if narrow else _NAMES
    left = max(map(text_width, names)) + 6
    longest_s = max(group.window.length_s for group in groups)
    x = Axis(0.0, longest_s, left, width - 1)
    pixel_s = longest_s / width
    besides = [key for track, key in _BESIDES.items() if _longest(groups, track) > pixel_s]
    shapes, y = draw_legend([*_KEYS, *besides], width=width, top=0)
    shapes.append(Label(0, y + 8, "Colours and numbers: buckets", colour="faint"))
    y += 20
    top = y
    for group in groups:
        room = width - text_width(group.note) - _BETWEEN
        shapes.append(label_within(room, 0, y + 13, group.label))
        shapes.append(Label(width, y + 13, group.note, "end", "faint"))
        y += _HEAD
        for row, row_name in enumerate(names):
            shapes.append(Label(left - 6, y + 15, row_name, "end", "faint"))
            shapes.append(Line(((left, y + _ROW), (width, y + _ROW)), "grid", 1))
            if row == 0:
                shapes += _draw_compute(group, x, y)
            else:
                track = (Track.REDUCE_SCATTER, Track.ALL_GATHER)[row - 1]
                shapes += _draw_network(group, track, x, y)
            y += _ROW + _BETWEEN
        y += _TAIL
    axis = _draw_axis(x, longest_s, top + _HEAD, y - _TAIL, most=4 if narrow else 9)
    return Picture(name, title, width, y + 28, (*axis, *shapes))


def _longest(groups: Sequence[TrackGroup], track: Track) -> float:
    parts = (part for group in groups for _, part in group.parts(track))
    return max((stop - start for start, stop in parts), default=0.0)


def _draw_axis(x: Axis, axis_s: float, top: float, bottom: float, *, most: int) -> list[Shape]:
    unit = time_unit(axis_s)
    shapes: list[Shape] = []
    scaled = Axis(0.0, unit.of(axis_s), x.start, x.stop)
    step = tick_step(scaled.high, most)
    for tick in scaled.ticks(most):
        place = scaled.place(tick)
        shapes.append(Line(((place, top), (place, bottom)), "grid", 1))
        anchor: Anchor = "end" if place > x.stop - 12 else "middle"
        shapes.append(Label(place, bottom + 15, tick_text(tick, step), anchor))
    middle = (x.start + x.stop) / 2
    text = f"{unit.name} since the step began"
    return [*shapes, Label(middle, bottom + 33, text, "middle", "faint")]


def _draw_compute(group: TrackGroup, x: Axis, y: float) -> list[Shape]:
    """What the main thread does; waits, and what is done besides, are cut out of a pass."""
    waits = union(part for _, part in group.parts(Track.WAIT))
    besides = {track: union(part for _, part in group.parts(track)) for track in _BESIDES}
    cut = union([*waits, *(part for parts in besides.values() for part in parts)])
    shapes: list[Shape] = []
    origin = group.window.start_s
    for kind, (start, stop) in group.window.passes(group.spans):
        left = subtract([(start - origin, stop - origin)], cut)
        shapes += _boxes(left, x, y, _PASSES[kind], _PASSES[kind], hatched=False)
    for track, key in _BESIDES.items():
        left = subtract(besides[track], waits)
        shapes += _boxes(left, x, y, key.colour, key.name, hatched=False)
    return shapes + _boxes(waits, x, y, "lost", "waits for communication", hatched=True)


def _boxes(
    parts: Sequence[tuple[float, float]],
    x: Axis,
    y: float,
    colour: str,
    what: str,
    *,
    hatched: bool,
) -> list[Shape]:
    return [
        Box(
            x.place(start),
            y,
            x.place(stop) - x.place(start),
            _ROW,
            colour,
            hatched,
            f"{what}: {time_text(stop - start)}",
        )
        for start, stop in parts
    ]


def _draw_network(group: TrackGroup, track: Track, x: Axis, y: float) -> list[Shape]:
    """Operations of one track; those in flight at once lie side by side."""
    parts = group.parts(track)
    ends: list[float] = []
    slots = []
    for _, (start, stop) in parts:
        slot = next((n for n, end in enumerate(ends) if end <= start + _TOUCH_S), len(ends))
        ends[slot : slot + 1] = [stop]
        slots.append(slot)
    height = _ROW / max(1, len(ends))
    shapes: list[Shape] = []
    for (span, part), slot in zip(parts, slots, strict=True):
        start, stop = map(x.place, part)
        bucket = span.bucket or 0
        top = y + slot * height
        hint = f"{span.name}: {time_text(span.stop_s - span.start_s)}"
        # A gap of half a pixel parts neighbours.
        box = Box(start, top, stop - start - 0.5, height - 0.5, bucket_colour(bucket), hint=hint)
        shapes.append(box)
        text, size = str(bucket), 10.0
        if height >= size and stop - start > text_width(text, size=size) + 2:
            middle = (start + stop) / 2
            place = top + height / 2 + size * 0.36
            colour = on_bucket_colour(bucket)
            shapes.append(Label(middle, place, text, "middle", colour, size))
    return shapes


_WIDTH = 900.0


def draw_plan(plan: Plan, timeline: Timeline, *, micro_batches: int = 1) -> Picture:
    """``timeline``, which ``plan`` gives, from the end of one backprop to that of the next.

    micro_batches: of an iteration, of which the timeline is one; nothing travels between others.
    """
    length, ranks = time_text(timeline.iteration_s), count_text(plan.world_size, "rank")
    spans, window = replica_spans(timeline)
    waits_s = total(part for s in spans if s.track is Track.WAIT and (part := window.clip(s)))
    hands_over = any(s.name.startswith("H") for s in timeline.spans)
    group = TrackGroup(
        f"simulated {'iteration' if micro_batches == 1 else 'micro-batch'} over {ranks}: {length}"
        + (", backprop with handing buckets over" if hands_over else ""),
        spans,
        window,
        f"waits {time_text(waits_s)}",
    )
    what = f"One iteration of {length}"
    if micro_batches > 1:
        whole = time_text(plan.prediction.iteration_s)
        what = f"An iteration of {whole}, of which the last micro-batch: {length}"
    title = f"{what} over {ranks}, simulated"
    return draw_tracks("plan", title, [group], width=_WIDTH)
