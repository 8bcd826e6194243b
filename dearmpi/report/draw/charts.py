"""Charts: values over the steps of a run as lines, and rows of bars with their numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dearmpi.report.draw.shape import (
    Anchor,
    Axis,
    Box,
    Key,
    Label,
    Line,
    Picture,
    Shape,
    Spot,
    axis_over,
    bucket_colour,
    draw_legend,
    label_within,
    on_bucket_colour,
    text_width,
    tick_step,
    tick_text,
)
from dearmpi.report.draw.units import digits, size_text

_MOST_POINTS, _MOST_SPOTS = 300, 50
_GAP = 8.0


@dataclass(frozen=True, slots=True)
class Series:
    """Points (step, value), finite, in order of steps. dots: for series of few points."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: str
    dots: bool = False


def draw_chart(
    name: str,
    title: str,
    series: Sequence[Series],
    *,
    unit: str,
    width: float,
    from_zero: bool = True,
) -> Picture:
    """A chart of ``series`` over steps; at least one of them has points.

    unit: what the values are, in words; it stands above the axis.
    """
    shown = [_thinned(one) for one in series if one.points]
    keys = [Key(one.name, one.colour) for one in shown]
    legend, top = draw_legend(keys if len(keys) > 1 else [], width=width, top=30)
    bottom = top + (150 if width < 600 else 190)
    values = [value for one in shown for _, value in one.points]
    y = axis_over(values, bottom, top, from_zero=from_zero)
    most = 6
    step = tick_step(y.high - y.low, most)
    texts = [(tick, tick_text(tick, step)) for tick in y.ticks(most)]
    left = max(text_width(text) for _, text in texts) + _GAP
    steps = [point for one in shown for point, _ in one.points]
    x = axis_over(steps, left, width - 14, from_zero=False)
    shapes: list[Shape] = [Label(0, 14, unit, colour="faint"), *legend]
    for tick, text in texts:
        shapes.append(Line(((left, y.place(tick)), (width, y.place(tick))), "grid", 1))
        shapes.append(Label(left - 4, y.place(tick) + 4, text, "end"))
    shapes += _draw_steps(x, bottom, most=5 if width < 600 else 9)
    for one in shown:
        shapes += _draw_series(one, x, y)
    shapes += _draw_spots(shown, x, (top, bottom), unit=unit)
    return Picture(name, title, width, bottom + 40, tuple(shapes))


def _draw_steps(x: Axis, bottom: float, *, most: int) -> list[Shape]:
    step = max(1.0, tick_step(x.high - x.low, most))
    ticks = [tick for tick in x.ticks(most) if tick == round(tick)]
    shapes: list[Shape] = [
        Label(x.place(tick), bottom + 18, tick_text(tick, step), "middle") for tick in ticks
    ]
    return [*shapes, Label((x.start + x.stop) / 2, bottom + 35, "step", "middle", "faint")]


def _draw_series(series: Series, x: Axis, y: Axis) -> list[Shape]:
    points = tuple((x.place(a), y.place(b)) for a, b in series.points)
    shapes: list[Shape] = []
    if len(points) > 1:
        shapes.append(Line(points, series.colour, 2))
    if series.dots or len(points) == 1:
        shapes += [Box(a - 2.5, b - 2.5, 5, 5, series.colour) for a, b in points]
    return shapes


def _draw_spots(
    shown: Sequence[Series], x: Axis, ends: tuple[float, float], *, unit: str
) -> list[Shape]:
    """Columns that show their values where a pointer rests, the last point of each series there."""
    by_column: dict[int, dict[int, tuple[float, float]]] = {}
    extent = abs(x.stop - x.start)
    count = max(1, min(_MOST_SPOTS, max(len(one.points) for one in shown), int(extent / 8)))
    for place, one in enumerate(shown):
        for point in one.points:
            column = min(int((x.place(point[0]) - x.start) / extent * count), count - 1)
            by_column.setdefault(column, {})[place] = point
    top, bottom = ends
    wide = extent / count
    spots = list[Shape]()
    for column, points in sorted(by_column.items()):
        step = max(step for step, _ in points.values())
        values = ", ".join(
            f"{shown[place].name} {digits(value)}" for place, (_, value) in sorted(points.items())
        )
        left = x.start + wide * column
        spots.append(Spot(left, top, wide, bottom - top, f"step {step:,.0f}: {values} ({unit})"))
    return spots


def _thinned(series: Series) -> Series:
    """The series with means of neighbours where it has more points than can be seen."""
    size = -(-len(series.points) // _MOST_POINTS)
    thinned = []
    for start in range(0, len(series.points), size):
        group = series.points[start : start + size]
        thinned.append((group[-1][0], math.fsum(value for _, value in group) / len(group)))
    return Series(series.name, tuple(thinned), series.colour, series.dots)


_STEP, _BAR, _GAP = 26.0, 15.0, 8.0


@dataclass(frozen=True, slots=True)
class Bar:
    """values: of each part, in the legend's order. note: what stands behind the bar."""

    label: str
    values: tuple[float, ...]
    note: str


def draw_bars(
    name: str, title: str, bars: Sequence[Bar], *, keys: Sequence[Key], unit: str, width: float
) -> Picture:
    """Bars (at least one) of one part for each of ``keys``. unit: of the values, in words.

    Where there is little width, labels and notes stand above their bars.
    """
    legend, top = draw_legend(keys, width=width, top=0)
    left = max(text_width(bar.label) for bar in bars) + _GAP
    right = max(text_width(bar.note) for bar in bars) + _GAP
    beside = left + right < width / 2
    if not beside:
        left, right = 0.0, 0.0
    step = _STEP if beside else _STEP + 16
    longest = max(sum(bar.values) for bar in bars) or 1.0
    axis = Axis(0.0, longest, left, width - right - (0 if beside else 12))
    bottom = top + step * len(bars)
    shapes: list[Shape] = [*legend]
    most = 6 if width >= 600 else 4
    distance = tick_step(longest, most)
    for tick in axis.ticks(most):
        x = axis.place(tick)
        shapes.append(Line(((x, top), (x, bottom)), "grid", 1))
        anchor: Anchor = "start" if not beside and tick == 0 else "middle"
        shapes.append(Label(x, bottom + 16, tick_text(tick, distance), anchor))
    shapes.append(Label((axis.start + axis.stop) / 2, bottom + 33, unit, "middle", "faint"))
    for place, bar in enumerate(bars):
        y = top + step * place
        shapes += _draw_bar(bar, keys, axis, y, unit, beside=beside, width=width)
    return Picture(name, title, width, bottom + 40, tuple(shapes))


def _draw_bar(
    bar: Bar,
    keys: Sequence[Key],
    axis: Axis,
    top: float,
    unit: str,
    *,
    beside: bool,
    width: float,
) -> list[Shape]:
    y = top + (_STEP - _BAR) / 2 + (0 if beside else 16)
    start, shapes = 0.0, list[Shape]()
    for key, value in zip(keys, bar.values, strict=True):
        x, stop = axis.place(start), axis.place(start + value)
        if value > 0:
            hint = f"{bar.label}, {key.name}: {digits(value)} {unit}"
            shapes.append(Box(x, y, stop - x, _BAR, key.colour, key.hatched, hint))
        start += value
    if beside:
        shapes.append(Label(axis.start - _GAP, y + 12, bar.label, "end"))
        shapes.append(Label(axis.place(start) + _GAP, y + 12, bar.note))
    else:
        room = width - text_width(bar.note) - _GAP
        shapes.append(label_within(room, 0, y - 5, bar.label))
        shapes.append(Label(width, y - 5, bar.note, "end", "faint"))
    return shapes


_HEIGHT = 34.0


@dataclass(frozen=True, slots=True)
class StackPart:
    """A part of a whole, which ``key`` names in the legend. hint: its value in words."""

    key: Key
    value: float
    hint: str


def draw_stack(
    name: str, title: str, parts: Sequence[StackPart], *, unit: str, width: float
) -> Picture:
    """One bar whose parts (of which one at least is above 0) fill the width."""
    keys = [Key(f"{one.key.name}: {one.hint}", one.key.colour, one.key.hatched) for one in parts]
    legend, top = draw_legend(keys, width=width, top=0)
    whole = math.fsum(one.value for one in parts)
    axis = Axis(0.0, whole, 0.0, width)
    bottom = top + _HEIGHT
    shapes: list[Shape] = [*legend]
    start = 0.0
    for one in parts:
        x, stop = axis.place(start), axis.place(start + one.value)
        hint = f"{one.key.name}: {one.hint}"
        shapes.append(Box(x, top, stop - x, _HEIGHT, one.key.colour, one.key.hatched, hint))
        start += one.value
    most = 9 if width >= 600 else 5
    distance = tick_step(whole, most)
    for tick in axis.ticks(most):
        x = axis.place(tick)
        anchor: Anchor = "start" if tick == 0 else "end" if x > width - 14 else "middle"
        shapes.append(Line(((x, bottom), (x, bottom + 4)), "faint", 1))
        shapes.append(Label(x, bottom + 17, tick_text(tick, distance), anchor))
    shapes.append(Label(width / 2, bottom + 34, unit, "middle", "faint"))
    return Picture(name, title, width, bottom + 40, tuple(shapes))


def draw_strip(name: str, title: str, sizes: Sequence[int], *, width: float) -> Picture:
    """Buckets of ``sizes`` bytes (at least one), in feed-forward order from the left."""
    shapes: list[Shape] = [
        Label(0, 12, "first layers", colour="faint"),
        Label(width, 12, "last layers", "end", "faint"),
    ]
    x, all_bytes = 0.0, sum(sizes)
    for bucket, size in enumerate(sizes):
        extent = width * size / all_bytes
        hint = f"bucket {bucket}: {size_text(size)}"
        shapes.append(Box(x, 20, extent - 0.7, _HEIGHT, bucket_colour(bucket), hint=hint))
        lines = [text for text in (str(bucket), size_text(size)) if text_width(text) < extent - 4]
        for row, text in enumerate(lines):
            y = 20 + _HEIGHT / 2 + 4 + (row - (len(lines) - 1) / 2) * 14
            colour = on_bucket_colour(bucket)
            shapes.append(Label(x + extent / 2, y, text, "middle", colour))
        x += extent
    total = f"{len(sizes)} buckets, {size_text(all_bytes)} in all"
    return Picture(name, title, width, 84, (*shapes, Label(0, 76, total, colour="faint")))
