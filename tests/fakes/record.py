"""Records: what was posted on a hub, and when its wire carried it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """``rank`` posted ``label`` on ``communicator``; a mark of the test's own has None there."""

    rank: int
    communicator: int | None
    label: str


@dataclass(frozen=True, slots=True)
class Carried:
    """``label`` occupied the wire of the hub from ``start_s`` to ``stop_s`` on its clock."""

    label: str
    start_s: float
    stop_s: float
