"""A benchmark's result as a picture: a bar for each method, a line for each bound."""

from __future__ import annotations

from dearmpi.bench.result import Result, Row, quartiles
from dearmpi.report import svg
from dearmpi.report.shape import Box, Label, Line, Picture, Shape
from dearmpi.report.unit import count_text

_WIDTH, _LEFT, _RIGHT = 728, 154, 74
_TOP, _STEP, _BAR, _BOTTOM = 60, 30, 18, 24
_OURS, _PEER, _PLAIN, _BOUND = "first", "backprop", "plain", "lost-text"
_OUR_NAMES = ("serial", "wfbp", "dear", "planned", "bayes")


def draw(result: Result) -> str:
    """An SVG document. Bars are medians, whiskers quartiles; methods that failed have no bar."""
    rows = [result.alone, *result.rows]
    most_s = max((max(row.totals()) for row in rows if row.blocks), default=1.0)
    bounds = result.bounds
    if bounds is not None:
        most_s = max(most_s, bounds.dear_s)
    scale = (_WIDTH - _LEFT - _RIGHT) / most_s
    bottom = _TOP + _STEP * len(rows)
    title = (
        f"{result.subject}: seconds per iteration, {count_text(result.world_size, 'rank')} on "
        f"{count_text(result.hosts, 'host')}"
    )
    shapes: list[Shape] = [Label(0, 10, title, size=15)]
    for number, row in enumerate(rows):
        shapes += _draw_row(row, _TOP + _STEP * number, scale, is_alone=row is result.alone)
    if bounds is not None:
        lines = (("bound of any method", bounds.absolute_s), ("bound of DeAR", bounds.dear_s))
        for place, (name, seconds) in enumerate(lines):
            shapes += _draw_bound(f"{name} {seconds:.3f}", _LEFT + seconds * scale, place, bottom)
    return svg.document(Picture("bench", title, _WIDTH, bottom + _BOTTOM, tuple(shapes)))


def _draw_row(row: Row, top: float, scale: float, *, is_alone: bool) -> list[Shape]:
    middle = top + _BAR / 2
    shapes: list[Shape] = [Label(_LEFT - 8, middle + 4, row.label, "end")]
    if not row.blocks:
        return [*shapes, Label(_LEFT + 6, middle + 4, "failed", colour=_BOUND)]
    colour = _OURS if row.label.partition(":")[0] in _OUR_NAMES else _PEER
    end = _LEFT + row.median_s * scale
    low, high = (_LEFT + value * scale for value in quartiles(row.totals()))
    return [
        *shapes,
        Box(_LEFT, top, end - _LEFT, _BAR, _PLAIN if is_alone else colour),
        Line(((low, middle), (high, middle)), "ink"),
        Label(max(high, end) + 6, middle + 4, f"{row.median_s:.3f}"),
    ]


def _draw_bound(label: str, x: float, place: int, bottom: float) -> list[Shape]:
    """A line from top to bottom; the two labels stand above and below the bars."""
    y = _TOP - 12 if place == 0 else bottom + 16
    return [
        Line(((x, _TOP - 8), (x, bottom)), _BOUND, dashed=place == 0),
        Label(x, y, label, "middle", _BOUND),
    ]
