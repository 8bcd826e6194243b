"""Crowd: many ranks, named in few words."""

from __future__ import annotations

from collections.abc import Sequence


def name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Ranks as ranges, with their hosts where these are few: ``ranks 0, 2-5 (node1)``.

    hosts: every rank's.
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
