"""What carrying loads from bucket to bucket gains, with and without decay over computation.

    python benchmarks/themis_loads.py [--seeds N]

A simulation without MPI: buckets become ready one after another, at random intervals. By Themis
each takes its chunks over the dimensions, either as if it came first ("alone"), or with what
earlier buckets have put on each dimension: all of it ("carried"), or what is left after the
interval ("decayed"). A dimension sends one chunk at a time, of the earliest bucket first. Intervals
are in units of what an average bucket takes when all dimensions send.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from dearmpi.chunk_orders import Crossing, DimensionWire, schedule
from dearmpi.cuts import even_cuts
from dearmpi.grid import num_chunks

GRIDS: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...] = (
    ((2, 2), (1.0, 1.0)),
    ((4, 2), (1.0, 1.0)),
    ((8, 8), (4.0, 1.0)),
    ((8, 4, 4), (4.0, 2.0, 1.0)),
)
MEGABYTES, INTERVALS, NUM_BUCKETS = (1, 25), (0.25, 0.5, 1.0, 2.0), 20
Carry = Literal["alone", "carried", "decayed"]


@dataclass(frozen=True, slots=True)
class Ready:
    """A bucket, and when it may begin."""

    at_s: float
    nbytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    seeds = range(parser.parse_args().seeds)
    print("grid        MB  interval  alone  carried  decayed   (end of the last bucket; alone: 1)")
    rows: list[tuple[float, float]] = []
    for sizes, rates in GRIDS:
        wires = [DimensionWire(size, rate * 1e9) for size, rate in zip(sizes, rates, strict=True)]
        for megabytes in MEGABYTES:
            for interval in INTERVALS:
                carried, decayed = compare(wires, megabytes << 20, interval, seeds)
                rows.append((carried, decayed))
                name = "x".join(map(str, sizes))
                row = (
                    f"{name:10} {megabytes:3}  {interval:8}  1.000  {carried:7.3f}  {decayed:7.3f}"
                )
                print(row)
    for name, found in zip(("carried", "decayed"), zip(*rows, strict=True), strict=True):
        print(f"{name}: mean {fmean(found):.3f}, from {min(found):.3f} to {max(found):.3f}")


def compare(
    wires: Sequence[DimensionWire], nbytes: int, interval: float, seeds: Sequence[int]
) -> tuple[float, float]:
    """The mean end with carried and with decayed loads, in units of the end without."""
    found: list[tuple[float, float]] = []
    for seed in seeds:
        buckets = buckets_of(wires, nbytes, interval, random.Random(seed))
        alone = end_s(wires, buckets, "alone")
        found.append(
            (end_s(wires, buckets, "carried") / alone, end_s(wires, buckets, "decayed") / alone)
        )
    return fmean(one for one, _ in found), fmean(other for _, other in found)


def buckets_of(
    wires: Sequence[DimensionWire], nbytes: int, interval: float, chance: random.Random
) -> list[Ready]:
    num_ranks = math.prod(wire.num_ranks for wire in wires)
    best_s = nbytes * (1 - 1 / num_ranks) / sum(wire.rate for wire in wires)
    now_s, found = 0.0, []
    for _ in range(NUM_BUCKETS):
        now_s += interval * best_s * chance.uniform(0.5, 1.5)
        found.append(Ready(now_s, int(nbytes * chance.choice([0.25, 0.5, 1, 1]))))
    return found


def end_s(wires: Sequence[DimensionWire], buckets: Sequence[Ready], carry: Carry) -> float:
    """When the last reduce-scatter has ended."""
    loads, before_s, chosen = [0.0] * len(wires), 0.0, []
    num_ranks = math.prod(wire.num_ranks for wire in wires)
    for bucket in buckets:
        if carry == "alone":
            loads = [0.0] * len(wires)
        elif carry == "decayed":  # loads count both operations, of which one has drained
            gone_s = 2 * (bucket.at_s - before_s)
            loads = [max(0.0, load - gone_s) for load in loads]
        before_s = bucket.at_s
        count = num_chunks(even_cuts(bucket.nbytes, num_ranks), 1)
        chunks = schedule(
            wires, float(bucket.nbytes), is_even=True, num_chunks=count, loads_s=loads
        )
        reduces = [chunk[: len(wires)] for chunk in chunks]
        for chunk in reduces:
            for one in chunk:
                loads[one.dimension] += 2 * wires[one.dimension].transfer_s(one.nbytes)
        chosen.append(reduces)
    return play(wires, buckets, chosen)


def play(
    wires: Sequence[DimensionWire],
    buckets: Sequence[Ready],
    chunks: Sequence[Sequence[Sequence[Crossing]]],
) -> float:
    """Each dimension serves the earliest bucket first, of it the smallest chunk."""
    waiting: list[list[tuple[int, float, int, int]]] = [[] for _ in wires]
    is_busy, last_s, count = [False] * len(wires), 0.0, 0
    events: list[tuple[float, int, int, int, int]] = []  # time, number, bucket, chunk, place
    for which, bucket in enumerate(buckets):
        for chunk in range(len(chunks[which])):
            heapq.heappush(events, (bucket.at_s, count, which, chunk, 0))
            count += 1
    while events:
        now_s, _, which, chunk, place = heapq.heappop(events)
        last_s = max(last_s, now_s)
        crossings = chunks[which][chunk]
        touched = []
        if place:
            touched.append(crossings[place - 1].dimension)
            is_busy[touched[0]] = False
        if place < len(crossings):
            crossing = crossings[place]
            heapq.heappush(waiting[crossing.dimension], (which, crossing.nbytes, chunk, place))
            touched.append(crossing.dimension)
        for dimension in touched:
            if waiting[dimension] and not is_busy[dimension]:
                is_busy[dimension] = True
                first, nbytes, served, at = heapq.heappop(waiting[dimension])
                free_s = now_s + wires[dimension].transfer_s(nbytes)
                heapq.heappush(events, (free_s, count, first, served, at + 1))
                count += 1
    return last_s


if __name__ == "__main__":
    main()
