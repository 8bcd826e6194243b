"""Draws a picture as SVG."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from dearmpi.report.draw.shape import (
    DARK,
    LIGHT,
    MARGIN,
    Box,
    Label,
    Line,
    Picture,
    Shape,
    Spot,
)

_STRIPES = (
    '<pattern id="stripes" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="2.5" height="6" fill="#000" '
    'fill-opacity="0.35"/></pattern>'
)


def element(picture: Picture) -> str:
    """An ``svg`` element to stand in a page with ``style()`` and ``definitions()``."""
    return (
        f'<svg viewBox="0 0 {_number(picture.width)} {_number(picture.height)}" role="img" '
        f'aria-label="{escape(picture.title)}">{_draw(picture)}</svg>'
    )


def document(picture: Picture) -> str:
    """A file of its own, with a margin and a background, dark where the reader's system is."""
    start = _number(-MARGIN)
    width, height = _number(picture.width + 2 * MARGIN), _number(picture.height + 2 * MARGIN)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="{start} {start} {width} {height}">\n<title>{escape(picture.title)}</title>\n'
        f"<style>\n{style()}\n</style>\n<defs>{_STRIPES}</defs>\n"
        f'<rect class="fpaper" x="{start}" y="{start}" width="{width}" height="{height}"/>\n'
        f"{_draw(picture)}\n</svg>\n"
    )


def definitions() -> str:
    """What the pictures of a page share; stands once in it."""
    return (
        f'<svg width="0" height="0" aria-hidden="true" class="hidden"><defs>{_STRIPES}</defs></svg>'
    )


def style() -> str:
    """The style sheet of all pictures."""
    fills = "\n".join(f".f{name}{{fill:var(--{name})}}" for name in LIGHT)
    strokes = "\n".join(f".s{name}{{stroke:var(--{name});fill:none}}" for name in LIGHT)
    return (
        f":root{{{_variables(LIGHT)}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}\n"
        f"{fills}\n{strokes}\nsvg text{{font-family:system-ui,sans-serif;font-size:12px;"
        "pointer-events:none}\nsvg text.hint{pointer-events:auto}\n"
        ".spot{fill:transparent}\n.spot:hover{fill:var(--ink);fill-opacity:.08}"
    )


def _variables(colours: Mapping[str, str]) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in colours.items())


def _draw(picture: Picture) -> str:
    return "\n".join(_draw_shape(shape) for shape in picture.shapes)


def _draw_shape(shape: Shape) -> str:
    if isinstance(shape, Box):
        return _draw_box(shape)
    if isinstance(shape, Line):
        points = " ".join(f"{_number(x)},{_number(y)}" for x, y in shape.points)
        lengths = " ".join(map(_number, shape.dashes))
        dashes = f' stroke-dasharray="{lengths}"' if lengths else ""
        width = _number(shape.width)
        return (
            f'<polyline class="s{shape.colour}" stroke-width="{width}"{dashes} points="{points}"/>'
        )
    if isinstance(shape, Spot):
        return f'<rect class="spot" {_place(shape)}><title>{escape(shape.hint)}</title></rect>'
    return _draw_label(shape)


def _place(shape: Box | Spot) -> str:
    return (
        f'x="{_number(shape.x)}" y="{_number(shape.y)}" '
        f'width="{_number(max(shape.width, 0.3))}" height="{_number(shape.height)}"'
    )


def _draw_box(box: Box) -> str:
    place = _place(box)
    hint = f"<title>{escape(box.hint)}</title>" if box.hint else ""
    end = f">{hint}</rect>" if hint else "/>"
    drawn = f'<rect class="f{box.colour}" {place}{end}'
    if box.hatched:
        drawn += f'<rect fill="url(#stripes)" pointer-events="none" {place}/>'
    return drawn


def _draw_label(label: Label) -> str:
    anchor = "" if label.anchor == "start" else f' text-anchor="{label.anchor}"'
    size = "" if label.size == 12 else f' style="font-size:{_number(label.size)}px"'
    place = f'x="{_number(label.x)}" y="{_number(label.y)}"'
    hint = f"<title>{escape(label.hint)}</title>" if label.hint else ""
    text = f"{hint}{escape(label.text)}"
    kind = f"f{label.colour}{' hint' if hint else ''}"
    return f'<text class="{kind}" {place}{anchor}{size}>{text}</text>'


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
