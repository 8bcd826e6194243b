"""Curves over logarithmic axes, several panels below each other, with one legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dearmpi.report.draw.shape import Label, Line, Picture, Shape

_WIDTH, _LEFT, _RIGHT = 760.0, 64.0, 150.0
_TOP, _PANEL, _BETWEEN = 34.0, 270.0, 74.0
_LEGEND_STEP, _SAMPLE = 20.0, 26.0
_MOST_TICKS = 8


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (x, y), both above 0, with a label for the legend. colour: a name in the palette.

    dashes: as a line's.
    """

    label: str
    points: tuple[tuple[float, float], ...]
    colour: str
    dashes: tuple[float, ...] = ()
    width: float = 1.5


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over one quantity. axis: what it is, with its unit. ticks: where it is marked."""

    axis: str
    ticks: tuple[float, ...]
    curves: tuple[Curve, ...]


@dataclass(frozen=True, slots=True)
class _Scale:
    """A logarithmic axis from ``low`` at pixel ``start`` to ``high`` at ``stop``."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        if self.high == self.low:
            return self.start
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.stop - self.start)


def draw_panels(name: str, title: str, panels: Sequence[Panel], *, y_axis: str) -> Picture:
    """Panels with the same curves in the same colours; the legend stands beside the first."""
    shapes: list[Shape] = [Label(16, _TOP - 12, y_axis, colour="faint")]
    top = _TOP
    for panel in panels:
        shapes += _draw_panel(panel, top)
        top += _PANEL + _BETWEEN
    shapes += _draw_legend(panels[0].curves)
    return Picture(name, title, _WIDTH, top - 20, tuple(shapes))


def _draw_panel(panel: Panel, top: float) -> list[Shape]:
    bottom, right = top + _PANEL, _WIDTH - _RIGHT
    xs = [x for curve in panel.curves for x, _ in curve.points]
    ys = [y for curve in panel.curves for _, y in curve.points]
    across = _Scale(min(xs), max(xs), _LEFT, right)
    marks = _marks(min(ys), max(ys))
    upwards = _Scale(marks[0], marks[-1], bottom, top)
    shapes: list[Shape] = []
    for mark in marks:
        y = upwards(mark)
        shapes.append(Line(((_LEFT, y), (right, y)), "grid", 1))
        shapes.append(Label(_LEFT - 8, y + 4, f"{mark:g}", "end"))
    for tick in panel.ticks:
        x = across(tick)
        shapes.append(Line(((x, bottom), (x, bottom + 5)), "faint", 1))
        shapes.append(Label(x, bottom + 19, f"{tick:g}", "middle"))
    shapes.append(Label((_LEFT + right) / 2, bottom + 38, panel.axis, "middle", "faint"))
    for curve in panel.curves:
        points = tuple((across(x), upwards(y)) for x, y in curve.points)
        shapes.append(Line(points, curve.colour, curve.width, curve.dashes))
    return shapes


def _draw_legend(curves: Sequence[Curve]) -> list[Shape]:
    shapes: list[Shape] = []
    left = _WIDTH - _RIGHT + 16
    for place, curve in enumerate(curves):
        y = _TOP + 10 + place * _LEGEND_STEP
        shapes.append(
            Line(((left, y), (left + _SAMPLE, y)), curve.colour, curve.width, curve.dashes)
        )
        shapes.append(Label(left + _SAMPLE + 6, y + 4, curve.label))
    return shapes


def _marks(low: float, high: float) -> list[float]:
    """Round numbers from below ``low`` to above ``high``: 1, 2, 5, or powers of ten alone."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1, 2, 5), (1, 3), (1,)):
        marks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        start = max(mark for mark in marks if mark <= low * 1.0001)
        stop = min(mark for mark in [*marks, 10.0 ** (last + 1)] if mark >= high * 0.9999)
        chosen = [mark for mark in marks if start <= mark <= stop]
        if len(chosen) <= _MOST_TICKS:
            break
    return chosen
