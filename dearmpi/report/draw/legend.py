"""A legend: what the colours of a picture stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dearmpi.report.draw.shape import Box, Label, Shape, text_width

_LINE, _SWATCH, _GAP = 20.0, 12.0, 18.0


@dataclass(frozen=True, slots=True)
class Key:
    """One entry."""

    name: str
    colour: str
    hatched: bool = False


def draw_legend(keys: Sequence[Key], *, width: float, top: float) -> tuple[list[Shape], float]:
    """Entries side by side in as many lines as ``width`` asks for, and where they end below."""
    shapes: list[Shape] = []
    x, y = 0.0, top
    for key in keys:
        needed = _SWATCH + 6 + text_width(key.name)
        if x > 0 and x + needed > width:
            x, y = 0.0, y + _LINE
        shapes.append(Box(x, y, _SWATCH, _SWATCH, key.colour, key.hatched))
        shapes.append(Label(x + _SWATCH + 6, y + 10.5, key.name))
        x += needed + _GAP
    return shapes, y + _LINE + 4 if keys else top
