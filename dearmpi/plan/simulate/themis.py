"""Themis: all-reduces in chunks, each of which crosses a network's dimensions in its own order.

A chunk first sends (P - 1) / P of itself in a dimension of P ranks. A P-th of it is left for the
other dimensions. Themis gives each chunk the order that evens out the loads of
the dimensions; the baseline gives all chunks the same one.

Source: "Themis" (arXiv 2110.04478, version 3): its algorithm, and the topologies of its table 2.
Bandwidths are of one NPU; a dimension sends one chunk at a time, and its latency is pipelined.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["ring", "direct", "switch"]

NUM_CHUNKS = 64
SIZES = tuple(100_000_000 * number for number in range(1, 11))
"""Bytes of the paper's all-reduces."""

_PART_OF_A_CHUNK = 16  # loads that differ by less than this part of a chunk are even


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of a network.

    num_ranks: how many meet in it. gigabits: per second, of one rank. step_ns: of one step of its
    collective, of which a ring takes P - 1, direct links 1, and halving and doubling over a switch
    log2 P.
    """

    num_ranks: int
    gigabits: float
    step_ns: float
    kind: Kind

    @property
    def bytes_per_s(self) -> float:
        """Of one rank."""
        return self.gigabits * 1e9 / 8

    @property
    def latency_s(self) -> float:
        """Of a reduce-scatter or an all-gather."""
        steps = {"ring": self.num_ranks - 1, "direct": 1, "switch": math.log2(self.num_ranks)}
        return steps[self.kind] * self.step_ns * 1e-9

    def transfer_s(self, nbytes: float) -> float:
        """How long the bytes of a reduce-scatter of ``nbytes`` occupy it."""
        return nbytes * (self.num_ranks - 1) / self.num_ranks / self.bytes_per_s


TOPOLOGIES: dict[str, tuple[Dimension, ...]] = {
    "2D-SW_SW": (Dimension(16, 1200, 700, "switch"), Dimension(64, 800, 1700, "switch")),
    "3D-SW_SW_SW_homo": (
        Dimension(16, 800, 700, "switch"),
        Dimension(8, 800, 700, "switch"),
        Dimension(8, 800, 1700, "switch"),
    ),
    "3D-SW_SW_SW_hetero": (
        Dimension(16, 1600, 700, "switch"),
        Dimension(8, 800, 700, "switch"),
        Dimension(8, 400, 1700, "switch"),
    ),
    "3D-FC_Ring_SW": (
        Dimension(8, 1400, 700, "direct"),
        Dimension(16, 800, 700, "ring"),
        Dimension(8, 400, 1700, "switch"),
    ),
    "4D-Ring_SW_SW_SW": (
        Dimension(4, 2000, 20, "ring"),
        Dimension(4, 1600, 700, "switch"),
        Dimension(8, 800, 700, "switch"),
        Dimension(8, 400, 1700, "switch"),
    ),
    "4D-Ring_FC_Ring_SW": (
        Dimension(4, 3000, 20, "ring"),
        Dimension(8, 1400, 700, "direct"),
        Dimension(4, 1200, 700, "ring"),
        Dimension(8, 800, 1700, "switch"),
    ),
}
"""From inner to outer, 1,024 ranks each."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """One chunk in one dimension. nbytes: what enters it."""

    dimension: int
    nbytes: float


def schedule(
    dimensions: Sequence[Dimension],
    nbytes: float,
    *,
    is_even: bool,
    num_chunks: int = NUM_CHUNKS,
) -> list[list[Crossing]]:
    """The crossings of each chunk of an all-reduce, in order: reduce-scatters, then all-gathers.

    nbytes: of one rank. is_even: by Themis; False: all from the inner dimension to the outer one.
    """
    inner_first = list(range(len(dimensions)))
    loads = [dimension.latency_s for dimension in dimensions]
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
    dimensions: Sequence[Dimension],
    chunks: Sequence[Sequence[Crossing]],
    *,
    is_smallest_first: bool,
) -> float:
    """When the last chunk has crossed all that it crosses; all begin at 0.

    is_smallest_first: which of the chunks that wait a dimension serves next; False: the first.
    """
    waiting: list[list[tuple[float, int, int, int]]] = [[] for _ in dimensions]
    is_busy = [False] * len(dimensions)
    events: list[tuple[float, int, bool, int, int]] = []  # the bool: a chunk has arrived
    end_s, count = 0.0, 0

    def serve(index: int, now_s: float) -> None:
        nonlocal count
        if is_busy[index] or not waiting[index]:
            return
        _, _, chunk, place = heapq.heappop(waiting[index])
        is_busy[index] = True
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
    return end_s


@dataclass(frozen=True, slots=True)
class ThemisRow:
    """Means over ``SIZES`` on one topology, or over all.

    baseline, fifo, smallest: the part of all links' time in which they send. fifo_gain,
    smallest_gain: how many times as fast as the baseline.
    """

    topology: str
    baseline: float
    fifo: float
    smallest: float
    fifo_gain: float
    smallest_gain: float

    def as_plain(self) -> dict[str, str | float]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


PAPER = ThemisRow("the paper's", 0.5631, 0.8767, 0.9514, 1.58, 1.72)


def compare_themis() -> list[ThemisRow]:
    """A row for each of ``TOPOLOGIES``, and the mean of all."""
    rows = [_compare(name, dimensions) for name, dimensions in TOPOLOGIES.items()]
    fields = ThemisRow.__slots__[1:]
    means = (sum(getattr(row, name) for row in rows) / len(rows) for name in fields)
    return [*rows, ThemisRow("mean", *means)]


def _compare(name: str, dimensions: Sequence[Dimension]) -> ThemisRow:
    num_ranks = math.prod(dimension.num_ranks for dimension in dimensions)
    most_per_s = sum(dimension.bytes_per_s for dimension in dimensions)
    used, gains = [0.0] * 3, [0.0] * 3
    for nbytes in SIZES:
        in_turn = schedule(dimensions, nbytes, is_even=False)
        evened = schedule(dimensions, nbytes, is_even=True)
        times_s = [
            seconds(dimensions, in_turn, is_smallest_first=False),
            seconds(dimensions, evened, is_smallest_first=False),
            seconds(dimensions, evened, is_smallest_first=True),
        ]
        sent = 2 * nbytes * (1 - 1 / num_ranks)
        for index, time_s in enumerate(times_s):
            used[index] += sent / (time_s * most_per_s) / len(SIZES)
            gains[index] += times_s[0] / time_s / len(SIZES)
    return ThemisRow(name, *used, *gains[1:])
