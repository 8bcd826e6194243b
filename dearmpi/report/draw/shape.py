"""Pictures as data: shapes at places, drawn by ``svg`` for browsers and by ``png`` for documents.

Lengths are in pixels of a screen at normal zoom, x to the right, y downwards. A colour is a name in
``palette``, so that one picture serves light and dark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442")
_ON_SERIES = ("#ffffff", "#000000", "#000000", "#000000", "#000000", "#000000")

_BOTH: dict[str, str] = {
    "lost": "#d55e00",
    "late": "#cc79a7",
    **{f"bucket{i}": colour for i, colour in enumerate(_SERIES)},
    **{f"on-bucket{i}": colour for i, colour in enumerate(_ON_SERIES)},
}
LIGHT: Mapping[str, str] = _BOTH | {
    "paper": "#ffffff",
    "ink": "#1f2428",
    "faint": "#5b646b",
    "grid": "#d5dadd",
    "feed-forward": "#b4c0c9",
    "backprop": "#7f909c",
    "data": "#4b3f72",
    "plain": "#b4c0c9",
    "first": "#0072b2",
    "second": "#b35000",
    "third": "#56b4e9",
    "fourth": "#e69f00",
    "fifth": "#4b3f72",
    "sixth": "#7f909c",
    "lost-text": "#a84800",
}
DARK: Mapping[str, str] = _BOTH | {
    "paper": "#14181b",
    "ink": "#e8ecee",
    "faint": "#a3adb4",
    "grid": "#363e44",
    "feed-forward": "#5b6972",
    "backprop": "#84939d",
    "data": "#a99bd6",
    "plain": "#5b6972",
    "first": "#56b4e9",
    "second": "#e69f00",
    "third": "#0072b2",
    "fourth": "#b35000",
    "fifth": "#f0e442",
    "sixth": "#5b6972",
    "lost-text": "#ff9147",
}


def bucket_colour(bucket: int) -> str:
    """The colour of a bucket; neighbours differ."""
    return f"bucket{bucket % len(_SERIES)}"


def on_bucket_colour(bucket: int) -> str:
    """The colour of text upon it."""
    return f"on-{bucket_colour(bucket)}"


Anchor = Literal["start", "middle", "end"]
TEXT = 12.0
DASHES = (4.0, 3.0)
MARGIN = 16.0  # around a picture in a file of its own
# Widths of letters in their font's size; generous, since each reader has other fonts.
_WIDTH, _NARROW, _WIDE = 0.64, 0.38, 0.96
_CUT = "\N{HORIZONTAL ELLIPSIS}"
_NARROW_LETTERS, _WIDE_LETTERS = frozenset("fijlrtI.,:;'|()[]- "), frozenset("mwMW%@")


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle. hatched: with stripes, to differ without colour.

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
    """A line through points (x, y). width 0 stands for as thin as can be seen.

    dashes: the lengths of strokes and gaps in turn; none make it whole.
    """

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.5
    dashes: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Label:
    """One line of text; y is its baseline. anchor: which end of it is at x. hint: as a box's."""

    x: float
    y: float
    text: str
    anchor: Anchor = "start"
    colour: str = "ink"
    size: float = TEXT
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Spot:
    """A place without a colour of its own. hint: shown where a pointer rests on it."""

    x: float
    y: float
    width: float
    height: float
    hint: str


Shape = Box | Line | Label | Spot


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
    num_narrow = sum(letter in _NARROW_LETTERS for letter in text)
    num_wide = sum(letter in _WIDE_LETTERS for letter in text)
    others = len(text) - num_narrow - num_wide
    return size * (num_narrow * _NARROW + num_wide * _WIDE + others * _WIDTH)


def label_within(width: float, x: float, y: float, text: str) -> Label:
    """``text`` from x on, cut off before it is wider than ``width``; then its hint is all of it."""
    if text_width(text) <= width:
        return Label(x, y, text)
    end = len(text)
    while end and text_width(text[:end].rstrip() + _CUT) > width:
        end -= 1
    return Label(x, y, text[:end].rstrip() + _CUT, hint=text)
