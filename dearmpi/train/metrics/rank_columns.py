"""Rank columns: what a row of metrics.jsonl tells of the ranks, so that it stays short.

Up to ``MOST_LISTED`` ranks each has its times there. Of more, those that are busy longest are told
by number; the others are as the median, for whoever reads it (``report/read/history.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields
from statistics import median
from typing import Any

from dearmpi.train.metrics.rank_times import RankTimes

MOST_LISTED = 64
LEAST_NAMED = 8
LISTS = tuple(f"rank_{f.name}" for f in fields(RankTimes))
SUMMARY = "rank_times"


def rank_columns(ranks: Sequence[RankTimes]) -> dict[str, Any]:
    """By name; nothing where nothing is known of ranks."""
    if not ranks:
        return {}
    by_kind = list(zip(*map(_rounded, ranks), strict=True))
    if len(ranks) <= MOST_LISTED:
        return dict(zip(LISTS, by_kind, strict=True))
    summary: dict[str, Any] = {"num_ranks": len(ranks)}
    for column, values in zip(fields(RankTimes), by_kind, strict=True):
        typical = round(median(values), 6)
        summary[column.name] = {"min": min(values), "median": typical, "max": max(values)}
    return {SUMMARY: {**summary, "busiest": {r: _rounded(ranks[r]) for r in _busiest(ranks)}}}


def _busiest(ranks: Sequence[RankTimes]) -> list[int]:
    """Those that are nearer to the busiest than to the median, as all ranks of a slow host are,
    and in any case the first few; in order of their numbers.
    """
    own_s = [times.own_s for times in ranks]
    midway_s = (median(own_s) + max(own_s)) / 2
    ordered = sorted(range(len(ranks)), key=lambda rank: own_s[rank], reverse=True)
    named = ordered[:LEAST_NAMED] + [r for r in ordered[LEAST_NAMED:] if own_s[r] > midway_s]
    return sorted(named)


def _rounded(times: RankTimes) -> list[float]:
    return [round(seconds, 6) for seconds in astuple(times)]
