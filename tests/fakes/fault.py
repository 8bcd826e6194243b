"""Fault: what a test has go wrong on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["refuse", "break", "stall", "delay"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with the ``nth`` (from 1) operation called ``label`` (None: any) on ``rank``.

    ``refuse``: starting it raises CommError. ``break``: testing it does. ``stall``: it never
    completes, on any rank. ``delay``: it completes ``delay_s`` seconds late on this rank.
    """

    rank: int
    action: Action
    nth: int = 1
    label: str | None = None
    delay_s: float = 0.0
