"""Operation: one collective of fake ranks, from the first post to the last result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dearmpi.cuts import Cuts
from tests.fakes.fault import Fault


@dataclass(slots=True)
class Operation:
    """One collective, as far as ranks have posted it.

    place: its communicator, and its number on that. contents: by rank, copies made when it posted.
    cuts: of uneven shards. faults: by rank, what goes wrong with it there.
    """

    place: tuple[int, int]
    kind: str
    label: str
    detail: Any
    signature: str
    first_rank: int
    cuts: Cuts | None
    contents: dict[int, Any] = field(default_factory=dict)
    faults: dict[int, Fault] = field(default_factory=dict)
    result: Any = None
    done_at_s: float | None = None
    error: str = ""
    num_delivered: int = 0
