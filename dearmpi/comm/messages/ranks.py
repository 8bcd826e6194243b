"""Ranks in messages to people: which ones, and where their lines differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

_NUM_DIGITS = 12

Gather = Callable[[str], Sequence[str]]
"""Gives every rank's text, by rank, to all of them (collective)."""


def name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Ranks as ranges, with the names of up to three hosts: ``ranks 0, 2-5 (node1)``.

    hosts: of every rank.
    """
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
    names = sorted({hosts[rank] for rank in ranks})
    where = f" ({', '.join(names)})" if len(names) <= 3 else f" ({len(names)} hosts)"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}{where}"


def digest(lines: Sequence[str]) -> str:
    """A short hash of ``lines``."""
    return hashlib.sha256(json.dumps(list(lines)).encode()).hexdigest()[:_NUM_DIGITS]


def first_difference(lines: Sequence[str], gather: Gather) -> list[str]:
    """Every rank's line, by rank, at the first place where ranks differ (collective).

    The line is ``nothing further`` on ranks whose lines have ended. Empty if all are the same.
    Bisection over hashes finds the place, so that only hashes and one line of each rank travel.
    """

    def is_alike(num_lines: int) -> bool:
        return len(set(gather(digest(lines[:num_lines])))) == 1

    same, differs = 0, max(int(num) for num in gather(str(len(lines))))
    if is_alike(differs):
        return []
    while differs - same > 1:
        middle = (same + differs) // 2
        if is_alike(middle):
            same = middle
        else:
            differs = middle
    return list(gather(lines[same] if same < len(lines) else "nothing further"))
