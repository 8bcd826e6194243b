"""Units: numbers, times, sizes and shares in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeUnit:
    """A unit of time; ``per_second`` of it make a second."""

    name: str
    per_second: float

    def of(self, seconds: float) -> float:
        return seconds * self.per_second


_UNITS = (TimeUnit("s", 1.0), TimeUnit("ms", 1e3), TimeUnit("us", 1e6))


def time_unit(longest_s: float) -> TimeUnit:
    """The unit in which a time of ``longest_s`` is at least 1, if there is one."""
    for unit in _UNITS:
        if unit.of(longest_s) >= 1:
            return unit
    return _UNITS[-1]


def time_text(seconds: float) -> str:
    """A time with three digits and its unit, as ``1.43 s``; less than half a us is ``0 s``."""
    if abs(seconds) < 5e-7:
        return "0 s"
    unit = time_unit(abs(seconds))
    return f"{digits(unit.of(seconds))} {unit.name}"


def size_text(num_bytes: float) -> str:
    """A size with three digits and its unit, as ``4.00 MiB``."""
    for name, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{digits(num_bytes / factor)} {name}"
    return f"{num_bytes:.0f} bytes"


def count_text(number: int, noun: str) -> str:
    """A number of things, as ``1 rank`` or ``4 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def share_text(share: float) -> str:
    """A share of one as ``36 %``."""
    return f"{share:.0%}".replace("%", " %")


def digits(value: float) -> str:
    """``value`` with three digits, and never in powers of ten between 0.001 and a million."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e6 or size < 1e-3:
        return f"{value:.3g}"
    return (
        f"{value:,.{2 if size < 10 else 1 if size < 100 else 0}f}" if size >= 1 else f"{value:.3g}"
    )


def value_text(value: float) -> str:
    """A loss or metric with four decimals, or three digits where these would hide it."""
    return digits(value) if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width, the first aligned left and the others right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
