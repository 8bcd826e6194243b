"""Themis: chunks that each cross a network's dimensions in an order of their own.

A chunk first sends (P - 1) / P of itself in a dimension of P ranks. A P-th of it is left for the
other dimensions. Themis gives each chunk the order that evens out the loads of
the dimensions; the baseline gives all chunks the same one.

The simulator of the paper's networks (``plan``) and collectives on a grid of ranks (``comm``) share
this. All that is here follows from its arguments alone, so that all ranks find the same.

Source: "Themis" (arXiv 2110.04478, version 3). A dimension sends one chunk at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

NUM_CHUNKS = 64
_PART_OF_A_CHUNK = 16  # loads that differ by less than this part of a chunk are even


@dataclass(frozen=True, slots=True)
class DimensionWire:
    """One dimension: the ranks that meet in it, and what each of them sends.

    rate: bytes per second, or in any unit. latency_s: of a reduce-scatter in it.
    """

    num_ranks: int
    rate: float
    latency_s: float = 0.0

    def transfer_s(self, nbytes: float) -> float:
        """How long the bytes of a reduce-scatter of ``nbytes`` occupy it."""
        return nbytes * (self.num_ranks - 1) / self.num_ranks / self.rate


@dataclass(frozen=True, slots=True)
class Crossing:
    """One chunk in one dimension. nbytes: what enters it."""

    dimension: int
    nbytes: float


def schedule(
    dimensions: Sequence[DimensionWire],
    nbytes: float,
    *,
    is_even: bool,
    num_chunks: int = NUM_CHUNKS,
    loads_s: Sequence[float] = (),
) -> list[list[Crossing]]:
    """The crossings of each chunk of an all-reduce, in order: reduce-scatters, then all-gathers.

    nbytes: of one rank. is_even: by Themis; False: all from the inner dimension to the outer one.
    loads_s: by dimension, for how long earlier all-reduces keep it; none unless given.
    """
    inner_first = list(range(len(dimensions)))
    before_s = loads_s or [0.0] * len(dimensions)
    loads = [one.latency_s + load_s for one, load_s in zip(dimensions, before_s, strict=True)]
    chunk = nbytes / num_chunks
    chunks = []
    for _ in range(num_chunks):
        least = min(inner_first, key=loads.__getitem__)
        counts = dimensions[least].transfer_s(chunk / _PART_OF_A_CHUNK)
        order = inner_first
        if is_even and max(loads) - min(loads) >= counts:
            order = sorted(inner_first, key=loads.__getitem__)
        left, reduces = chunk, []
        for index in order:
            reduces.append(Crossing(index, left))
            loads[index] += 2 * dimensions[index].transfer_s(left)
            left /= dimensions[index].num_ranks
        chunks.append([*reduces, *reversed(reduces)])
    return chunks


def seconds(
    dimensions: Sequence[DimensionWire],
    chunks: Sequence[Sequence[Crossing]],
    *,
    is_smallest_first: bool,
) -> float:
    """When the last chunk has crossed all that it crosses; all begin at 0.

    is_smallest_first: which of the chunks that wait a dimension serves next; False: the first.
    """
    return play(dimensions, chunks, is_smallest_first=is_smallest_first)[0]


def play(
    dimensions: Sequence[DimensionWire],
    chunks: Sequence[Sequence[Crossing]],
    *,
    is_smallest_first: bool,
) -> tuple[float, list[tuple[int, int]]]:
    """The end as in ``seconds``, and (chunk, place in its crossings) in the order of service.

    A crossing stands behind the one that the same chunk has before it.
    """
    waiting: list[list[tuple[float, int, int, int]]] = [[] for _ in dimensions]
    is_busy = [False] * len(dimensions)
    events: list[tuple[float, int, bool, int, int]] = []  # the bool: a chunk has arrived
    end_s, count = 0.0, 0
    served: list[tuple[int, int]] = []

    def serve(index: int, now_s: float) -> None:
        nonlocal count
        if is_busy[index] or not waiting[index]:
            return
        _, _, chunk, place = heapq.heappop(waiting[index])
        is_busy[index] = True
        served.append((chunk, place))
        free_s = now_s + dimensions[index].transfer_s(chunks[chunk][place].nbytes)
        heapq.heappush(events, (free_s, count, False, index, 0))
        arrives_s = free_s + dimensions[index].latency_s
        heapq.heappush(events, (arrives_s, count + 1, True, chunk, place + 1))
        count += 2

    def arrive(chunk: int, place: int, now_s: float) -> None:
        nonlocal count
        crossing = chunks[chunk][place]
        rank = crossing.nbytes if is_smallest_first else 0.0
        heapq.heappush(waiting[crossing.dimension], (rank, count, chunk, place))
        count += 1
        serve(crossing.dimension, now_s)

    for chunk in range(len(chunks)):
        arrive(chunk, 0, 0.0)
    while events:
        now_s, _, has_arrived, which, place = heapq.heappop(events)
        if not has_arrived:
            is_busy[which] = False
            serve(which, now_s)
        elif place < len(chunks[which]):
            arrive(which, place, now_s)
        else:
            end_s = max(end_s, now_s)
    return end_s, served
