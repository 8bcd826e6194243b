"""Wire pace: how fast operations crossed the wire in training, beside what a measurement says.

A link is measured before the first step, on connections that have hardly been used: TCP carries up
to a fifth less in their first seconds than ever after. What training itself has sent is evidence
of how much they can carry.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_LEAST_WIRE_S = 0.05  # below, it matters how ranks differ in when they begin


class Crossed(NamedTuple):
    """An operation that is over: from posting to completion, and for how long it should have
    needed the whole wire, in seconds.
    """

    start_s: float
    stop_s: float
    wire_s: float


def wire_pace(crossings: Iterable[Crossed]) -> float:
    """The least time over what was expected, of stretches with something always under way.

    ``crossings``: of one kind, since one kind may need longer than another for the same bytes.
    At most 1: what takes longer may have waited for another rank. A stretch counts from where all
    operations are over that were posted before its first was: other ranks may have begun those
    earlier. Of what is under way there, as large a part counts as there is left of its time.
    """
    return min((_pace(stretch) for stretch in _stretches(crossings)), default=1.0)


def _stretches(crossings: Iterable[Crossed]) -> list[list[Crossed]]:
    """The operations, in order of posting, parted where nothing was under way."""
    stretches: list[list[Crossed]] = []
    stop_s = float("-inf")
    for crossing in sorted(crossings):
        if crossing.start_s > stop_s:
            stretches.append([])
        stretches[-1].append(crossing)
        stop_s = max(stop_s, crossing.stop_s)
    return stretches


def _pace(stretch: list[Crossed]) -> float:
    first_stop_s = min(crossing.stop_s for crossing in stretch)
    begin_s = max(crossing.stop_s for crossing in stretch if crossing.start_s < first_stop_s)
    wire_s = sum(
        one.wire_s * (one.stop_s - max(one.start_s, begin_s)) / (one.stop_s - one.start_s)
        for one in stretch
        if one.stop_s > max(one.start_s, begin_s)
    )
    if wire_s < _LEAST_WIRE_S:
        return 1.0
    return min(1.0, (max(crossing.stop_s for crossing in stretch) - begin_s) / wire_s)
