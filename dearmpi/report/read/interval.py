"""Intervals of time, as lists of (start, stop) in seconds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval], *, gap_s: float = 0.0) -> list[Interval]:
    """What at least one of them covers, in order; gaps of up to ``gap_s`` are closed."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1] + gap_s:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def subtract(intervals: Iterable[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """What is left of ``intervals`` outside of ``holes``, which are in order and apart."""
    left = []
    highs = [high for _, high in holes]
    for start, stop in intervals:
        for place in range(bisect_right(highs, start), len(holes)):
            low, high = holes[place]
            if low >= stop:
                break
            if low > start:
                left.append((start, low))
            start = high
        if start < stop:
            left.append((start, stop))
    return left


def intersect(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What both cover; each of them is in order and apart."""
    return subtract(some, subtract(some, others))


def total(intervals: Iterable[Interval]) -> float:
    """The sum of their lengths."""
    return sum(stop - start for start, stop in intervals)
