"""Span: something that took time in an iteration, and the recorder that gets it. The engine makes
spans, and the report draws them; neither knows the other."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol


class Track(IntEnum):
    """What a span is part of, drawn in a line of its own."""

    COMPUTE = 1
    WAIT = 2
    REDUCE_SCATTER = 3
    ALL_GATHER = 4
    UPDATE = 5
    DATA = 6
    CHECKPOINT = 7
    CODEC = 8

    @property
    def label(self) -> str:
        """The track in words."""
        return _LABELS[self]


_LABELS = {track: track.name.lower().replace("_", "-") for track in Track}


class Span(NamedTuple):
    """One span; a tuple, since hundreds of them are made in an iteration.

    start_s, stop_s: on the clock of ``time.perf_counter``.
    iteration: the one that it belongs to, from 1; an all-gather may end in the next one.
    bucket, nbytes: of a bucket's operation or update, else None.
    queued_s: when a collective was submitted; it is posted (``start_s``) when its turn comes.
    progress_s: when the first part of a collective had arrived, where the algorithm can tell.
    """

    track: Track
    name: str
    start_s: float
    stop_s: float
    iteration: int
    bucket: int | None = None
    nbytes: int | None = None
    queued_s: float | None = None
    progress_s: float | None = None


class Recorder(Protocol):
    """Told of each span when it is over, on the thread where it ended."""

    def add(self, span: Span) -> None: ...
