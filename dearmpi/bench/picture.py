"""A benchmark's result as a picture: a bar for each method, a line for each bound."""

from __future__ import annotations

from collections.abc import Sequence

from dearmpi.bench.result import Bounds, Result, Row, quartiles
from dearmpi.report.draw import svg
from dearmpi.report.draw.axis import Axis
from dearmpi.report.draw.shape import DASHES, Box, Label, Line, Picture, Shape, text_width
from dearmpi.report.draw.unit import TimeUnit, count_text, time_unit

_WIDTH, _RIGHT, _GAP = 728, 74, 8
_TOP, _STEP, _BAR, _BOTTOM = 60, 30, 18, 24
_LEAST = 300  # pixels of the longest bar, however long the labels
_OURS, _PEER, _PLAIN, _BOUND = "first", "backprop", "plain", "lost-text"
_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds"}
_OUR_NAMES = ("serial", "wfbp", "dear", "planned", "bayes")


def draw(result: Result) -> str:
    """An SVG document. Bars are medians, whiskers quartiles; methods that failed have no bar.
    The numbers stand at the right, where no bound crosses them.
    """
    rows = [result.alone, *result.rows]
    bounds = result.bounds
    most_s = _longest_s(rows, bounds)
    unit = time_unit(most_s)
    left = max(text_width(row.name) for row in rows) + _GAP
    axis = Axis(0.0, most_s, left, max(_WIDTH - _RIGHT, left + _LEAST))
    bottom = _TOP + _STEP * len(rows)
    title = (
        f"{result.subject}: {_NAMES[unit.name]} per iteration, "
        f"{count_text(result.world_size, 'rank')} on {count_text(result.hosts, 'host')}"
    )
    shapes: list[Shape] = [Label(0, 10, title, size=15)]
    for number, row in enumerate(rows):
        is_alone = row is result.alone
        shapes += _draw_row(row, _TOP + _STEP * number, axis, unit, is_alone=is_alone)
    width = axis.stop + _RIGHT
    if bounds is not None:
        sent = " in fp32" if result.rows_that_send_less() else ""
        lines = (("bound of any method", bounds.absolute_s), ("bound of DeAR", bounds.dear_s))
        for place, (name, seconds) in enumerate(lines):
            label = f"{name}{sent} {unit.of(seconds):.3f}"
            x = axis.place(seconds)
            shapes += _draw_bound(label, x, place, bottom=bottom, width=width)
    return svg.document(Picture("bench", title, width, bottom + _BOTTOM, tuple(shapes)))


def _longest_s(rows: Sequence[Row], bounds: Bounds | None) -> float:
    """Of all that is drawn: a slow iteration or two would flatten the bars, and are not."""
    drawn = [] if bounds is None else [bounds.dear_s]
    for row in rows:
        if row.blocks:
            drawn += [row.median_s, *quartiles(row.totals())]
    return max(drawn, default=1.0)


def _draw_row(row: Row, top: float, axis: Axis, unit: TimeUnit, *, is_alone: bool) -> list[Shape]:
    middle = top + _BAR / 2
    shapes: list[Shape] = [Label(axis.start - _GAP, middle + 4, row.name, "end")]
    if not row.blocks:
        return [*shapes, Label(axis.start + 6, middle + 4, "failed", colour=_BOUND)]
    colour = _OURS if row.label.partition(":")[0] in _OUR_NAMES else _PEER
    end = axis.place(row.median_s)
    low, high = (axis.place(value) for value in quartiles(row.totals()))
    return [
        *shapes,
        Box(axis.start, top, end - axis.start, _BAR, _PLAIN if is_alone else colour),
        Line(((low, middle), (high, middle)), "ink"),
        Label(axis.stop + _GAP, middle + 4, f"{unit.of(row.median_s):.3f}"),
    ]


def _draw_bound(label: str, x: float, place: int, *, bottom: float, width: float) -> list[Shape]:
    """A line from top to bottom; the two labels stand above and below the bars."""
    half = text_width(label) / 2
    middle = min(max(x, half), width - half)
    y = _TOP - 12 if place == 0 else bottom + 16
    return [
        Line(((x, _TOP - 8), (x, bottom)), _BOUND, dashes=DASHES if place == 0 else ()),
        Label(middle, y, label, "middle", _BOUND),
    ]
