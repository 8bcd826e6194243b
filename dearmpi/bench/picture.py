"""A benchmark's result as a picture: a bar for each method, a line for each bound."""

from __future__ import annotations

from xml.sax.saxutils import escape

from dearmpi.bench.result import Result, Row, quartiles

_WIDTH, _LEFT, _RIGHT = 760, 170, 90
_TOP, _STEP, _BAR, _BOTTOM = 76, 30, 18, 40
_OURS, _PEER, _PLAIN = "#1b6e9c", "#b0b7bd", "#dfe3e6"
_INK, _BOUND = "#22282c", "#c0392b"
_OUR_NAMES = ("serial", "wfbp", "dear")


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
        f"{result.subject}: seconds per iteration, {result.world_size} ranks on "
        f"{result.hosts} host(s)"
    )
    parts = [_text(16, 26, title, size=15)]
    for number, row in enumerate(rows):
        parts += _draw_row(row, _TOP + _STEP * number, scale, is_alone=row is result.alone)
    if bounds is not None:
        lines = (("bound of any method", bounds.absolute_s), ("bound of DeAR", bounds.dear_s))
        for place, (name, seconds) in enumerate(lines):
            parts += _draw_bound(f"{name} {seconds:.3f}", _LEFT + seconds * scale, place, bottom)
    height = bottom + _BOTTOM
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _draw_row(row: Row, top: float, scale: float, *, is_alone: bool) -> list[str]:
    middle = top + _BAR / 2
    parts = [_text(_LEFT - 8, middle + 4, row.label, anchor="end")]
    if not row.blocks:
        return [*parts, _text(_LEFT + 6, middle + 4, "failed", colour=_BOUND)]
    colour = _OURS if row.label.partition(":")[0] in _OUR_NAMES else _PEER
    end = _LEFT + row.median_s * scale
    low, high = (_LEFT + value * scale for value in quartiles(row.totals()))
    return [
        *parts,
        f'<rect x="{_LEFT}" y="{top}" width="{end - _LEFT:.1f}" height="{_BAR}" '
        f'fill="{_PLAIN if is_alone else colour}"/>',
        _line(low, middle, high, middle, _INK),
        _text(max(high, end) + 6, middle + 4, f"{row.median_s:.3f}"),
    ]


def _draw_bound(label: str, x: float, place: int, bottom: float) -> list[str]:
    """A line from top to bottom; the two labels stand above and below the bars."""
    y = _TOP - 12 if place == 0 else bottom + 16
    return [
        _line(x, _TOP - 8, x, bottom, _BOUND, dashed=place == 0),
        _text(x, y, label, anchor="middle", colour=_BOUND),
    ]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="1.5"{dashes}/>'
    )


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = _INK, size: int = 12
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{colour}">{escape(text)}</text>'
    )
