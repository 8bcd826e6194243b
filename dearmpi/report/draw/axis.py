"""An axis: from values to pixels, with round numbers along it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dearmpi.report.draw.shape import Box, Label, Shape, text_width

_EASY = (1.0, 2.0, 5.0, 10.0)
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
