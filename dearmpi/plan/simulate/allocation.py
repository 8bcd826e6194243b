"""Allocation: how much work and bandwidth workers of unequal speed and links get.

The paper's problem (Wen, Bennis, Huang: Joint Parameter-and-Bandwidth Allocation for Improving the
Efficiency of Partitioned Edge Learning, arXiv 2003.04544): worker k computes on ``L_k`` of the
model's parameters and sends them over the part ``rho_k`` of a shared band. Both together take
``L_k (a_k / rho_k + b_k)`` seconds. A round lasts as long as its slowest worker.

In synchronous data parallelism a rank computes on samples, and its links are its own. What is left
of the problem is the load: ``dearmpi.batch_shares.fastest_sizes``, the last column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dearmpi.batch_shares import fastest_sizes

_HALVINGS = 200  # of an interval of floats, which then has no number inside


@dataclass(frozen=True, slots=True)
class Worker:
    """send_s: to send one parameter over the whole band. compute_s: to compute on it. Both above 0,
    in any unit of time.
    """

    send_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class Allocation:
    """loads: parts of the parameters; bands: parts of the band; both by worker, each sum being 1.
    round_s: the time of a round, for one parameter.
    """

    loads: tuple[float, ...]
    bands: tuple[float, ...]
    round_s: float


def allocate_evenly(workers: Sequence[Worker]) -> Allocation:
    """All workers get the same."""
    part = (1.0 / len(workers),) * len(workers)
    return _allocation(workers, part, part)


def allocate_load(workers: Sequence[Worker], bands: Sequence[float]) -> Allocation:
    """The loads with which all workers end together; ``bands`` are given."""
    speeds = [1.0 / (w.send_s / band + w.compute_s) for w, band in zip(workers, bands, strict=True)]
    return _allocation(workers, [speed / sum(speeds) for speed in speeds], bands)


def allocate_band(workers: Sequence[Worker], loads: Sequence[float]) -> Allocation:
    """The bands with which all workers end together; ``loads`` are given."""

    def bands(round_s: float) -> list[float]:
        """What each worker needs to end in time; no worker without load needs a part."""
        return [
            load * w.send_s / (round_s - load * w.compute_s)
            for w, load in zip(workers, loads, strict=True)
        ]

    computing = max(load * w.compute_s for w, load in zip(workers, loads, strict=True))
    sending = sum(load * w.send_s for w, load in zip(workers, loads, strict=True))
    round_s = _falling_to_one(lambda time: sum(bands(time)), computing, computing + sending)
    found = bands(round_s)
    return _allocation(workers, loads, [band / sum(found) for band in found])


def allocate_jointly(workers: Sequence[Worker]) -> Allocation:
    """The loads and bands of the shortest round.

    For given bands a round of time T takes loads of ``T sum(rho / (a + b rho))`` together. So the
    best bands make that sum largest. It is concave; where its derivatives are all one number,
    ``rho = (sqrt(a / number) - a) / b``, or 0 for workers whose links are too slow.
    """

    def bands(number: float) -> list[float]:
        return [max(0.0, (math.sqrt(w.send_s / number) - w.send_s) / w.compute_s) for w in workers]

    highest = max(1.0 / w.send_s for w in workers)
    lowest = min(w.send_s / (w.send_s + w.compute_s) ** 2 for w in workers)
    found = bands(_falling_to_one(lambda number: sum(bands(number)), lowest, highest))
    found = [band / sum(found) for band in found]
    speeds = [b / (w.send_s + w.compute_s * b) for w, b in zip(workers, found, strict=True)]
    return _allocation(workers, [speed / sum(speeds) for speed in speeds], found)


def _allocation(
    workers: Sequence[Worker], loads: Sequence[float], bands: Sequence[float]
) -> Allocation:
    times = [
        load * (w.send_s / band + w.compute_s)
        for w, load, band in zip(workers, loads, bands, strict=True)
        if load > 0
    ]
    return Allocation(tuple(loads), tuple(bands), max(times))


def _falling_to_one(function: Callable[[float], float], low: float, high: float) -> float:
    """Where ``function``, which falls from 1 or more to 1 or less, is 1. It is not called at the
    ends.
    """
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if function(middle) > 1 else (low, middle)
    return high


NUM_WORKERS = 8
SPREADS = (1.0, 2.0, 4.0, 10.0)
BATCH_SIZE = 1024
_ORDER = (3, 6, 1, 4, 7, 0, 5, 2)  # of speeds, so that slow links and slow workers are not the same


@dataclass(frozen=True, slots=True)
class AllocationRow:
    """Times of a round for one spread; ``even`` for equal workers is 1.

    spread: how much faster the fastest link and worker are than the slowest. even, band, load,
    joint: what is allocated. samples: a synchronous step whose batch is divided by speed, over one
    whose batch is divided evenly.
    """

    spread: float
    even: float
    band: float
    load: float
    joint: float
    samples: float

    def as_plain(self) -> dict[str, float]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def spread_workers(spread: float) -> list[Worker]:
    """Workers whose links and speeds are from 1 to ``spread`` times as slow as the fastest. With
    the even part of the band the fastest sends as long as it computes.
    """
    steps = [spread ** (number / (NUM_WORKERS - 1)) for number in range(NUM_WORKERS)]
    return [Worker(steps[k] / NUM_WORKERS, steps[_ORDER[k]]) for k in range(NUM_WORKERS)]


def compare_allocations() -> list[AllocationRow]:
    """A row for each of ``SPREADS``."""
    return [_compare(spread) for spread in SPREADS]


def _compare(spread: float) -> AllocationRow:
    workers = spread_workers(spread)
    even = allocate_evenly(workers)
    whole = allocate_evenly(spread_workers(1.0)).round_s
    band, load = allocate_band(workers, even.loads), allocate_load(workers, even.bands)
    speeds = [worker.compute_s for worker in workers]
    sizes = fastest_sizes(BATCH_SIZE, speeds)
    step_s = max(size * speed for size, speed in zip(sizes, speeds, strict=True))
    return AllocationRow(
        spread,
        even=even.round_s / whole,
        band=band.round_s / whole,
        load=load.round_s / whole,
        joint=allocate_jointly(workers).round_s / whole,
        samples=step_s / (BATCH_SIZE / NUM_WORKERS * max(speeds)),
    )
