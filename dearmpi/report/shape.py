"""Pictures as data: shapes at places, drawn by ``svg`` for browsers and by ``png`` for documents.

Lengths are in pixels of a screen at normal zoom, x to the right, y downwards. A colour is a name in
``palette``, so that one picture serves light and dark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Anchor = Literal["start", "middle", "end"]
TEXT = 12.0
DIGIT = 0.64  # width of a digit or letter, in its font's size; generous


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle. hatched: with stripes, so that it is told apart without colour.

    hint: shown where a pointer rests on it.
    """

    x: float
    y: float
    width: float
    height: float
    colour: str
    hatched: bool = False
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points (x, y). width 0 stands for as thin as can be seen."""

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.5
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Label:
    """One line of text; y is its baseline. anchor: which end of it is at x."""

    x: float
    y: float
    text: str
    anchor: Anchor = "start"
    colour: str = "ink"
    size: float = TEXT


Shape = Box | Line | Label


@dataclass(frozen=True, slots=True)
class Picture:
    """name: of its file. title: says what it shows to who cannot see it."""

    name: str
    title: str
    width: float
    height: float
    shapes: tuple[Shape, ...]


def text_width(text: str, *, size: float = TEXT) -> float:
    """About how wide ``text`` is, in pixels; rather too wide than too narrow."""
    return len(text) * size * DIGIT
