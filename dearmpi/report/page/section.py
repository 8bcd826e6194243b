"""Section of the report: a picture, with the numbers that belong beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dearmpi.report.draw.shape import Picture


@dataclass(frozen=True, slots=True)
class Section:
    """A picture that can be drawn at any width, and what its numbers say, as plain text.

    table: rows of cells, the first of them the heading; empty where there is none.
    """

    heading: str
    draw: Callable[[float], Picture]
    caption: str
    table: tuple[tuple[str, ...], ...] = ()
