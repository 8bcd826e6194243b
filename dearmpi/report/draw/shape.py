"""Pictures as data: shapes at places, drawn by ``svg`` for browsers and by ``png`` for documents;
axes and legends.

Lengths are in pixels of a screen at normal zoom, x to the right, y downwards. A colour is a name in
``palette``, so that one picture serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

_EASY = (1.0, 2.0, 5.0, 10.0)

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


@dataclass(frozen=True, slots=True)
class Section:
    """A picture that can be drawn at any width, and what its numbers say, as plain text.

    table: rows of cells, the first of them the heading; empty where there is none.
    """

    heading: str
    draw: Callable[[float], Picture]
    caption: str
    table: tuple[tuple[str, ...], ...] = ()


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


_MOST_DECIMALS, _MOST_ZEROS = 6, 7  # of ticks that are written without a power of ten


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps ``low`` .. ``high`` to the pixels ``start`` .. ``stop`` (either may be the greater).

    logarithmic: equal ratios are equally far apart; values are above 0.
    """

    low: float
    high: float
    start: float
    stop: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        if self.high == self.low:
            return self.start
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, most: int) -> tuple[float, ...]:
        """At most ``most`` (at least 2) round values within the axis, evenly spaced."""
        step = tick_step(self.high - self.low, most)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return tuple(number * step for number in range(first, last + 1))


def axis_over(values: list[float], start: float, stop: float, *, from_zero: bool) -> Axis:
    """An axis that holds ``values`` (at least one), with a little room; never without extent."""
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high == low:
        spread = abs(high) / 2 or 1.0
        return Axis(low if from_zero else low - spread, high + spread, start, stop)
    room = (high - low) * 0.05
    return Axis(low if from_zero else low - room, high + room, start, stop)


def tick_step(extent: float, most: int) -> float:
    """The least of 1, 2 and 5 times a power of ten of which ``most`` ticks cover ``extent``."""
    rough = extent / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(easy * power for easy in _EASY if easy * power >= rough * (1 - 1e-9))


def tick_text(value: float, step: float) -> str:
    """``value`` with as many digits as ticks ``step`` apart need, all of an axis in one manner."""
    power = math.floor(math.log10(step) + 1e-9)
    if -_MOST_DECIMALS <= power < _MOST_ZEROS:
        return f"{value:,.{max(0, -power)}f}"
    if abs(value) <= step / 2:
        return "0"
    num_digits = math.floor(math.log10(abs(value)) + 1e-9) - power + 1
    return f"{value:.{min(17, max(1, num_digits))}g}"


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
