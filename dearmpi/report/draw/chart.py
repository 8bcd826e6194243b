"""Charts: values over the steps of a run, as lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dearmpi.report.draw.axis import Axis, Key, axis_over, draw_legend, tick_step, tick_text
from dearmpi.report.draw.shape import Box, Label, Line, Picture, Shape, text_width

_MOST_POINTS = 300
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


def _thinned(series: Series) -> Series:
    """The series with means of neighbours where it has more points than can be seen."""
    size = -(-len(series.points) // _MOST_POINTS)
    thinned = []
    for start in range(0, len(series.points), size):
        group = series.points[start : start + size]
        thinned.append((group[-1][0], math.fsum(value for _, value in group) / len(group)))
    return Series(series.name, tuple(thinned), series.colour, series.dots)
