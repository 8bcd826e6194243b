"""Themis on the networks of its paper, beside the paper's figures.

Source: "Themis" (arXiv 2110.04478, version 3), its table 2. Bandwidths are of one NPU; a dimension
sends one chunk at a time, and its latency is pipelined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dearmpi.chunk_orders import DimensionWire, schedule, seconds

Kind = Literal["ring", "direct", "switch"]

SIZES = tuple(100_000_000 * number for number in range(1, 11))
"""Bytes of the paper's all-reduces."""


def wire_of(num_ranks: int, gigabits: float, step_ns: float, kind: Kind) -> DimensionWire:
    """A dimension in which ``num_ranks`` meet, each of which sends ``gigabits`` per second.

    step_ns: of one step of its collective. A ring takes P - 1 of them, direct links 1, halving and
    doubling over a switch log2 P.
    """
    steps = {"ring": num_ranks - 1, "direct": 1, "switch": math.log2(num_ranks)}[kind]
    return DimensionWire(num_ranks, gigabits * 1e9 / 8, steps * step_ns * 1e-9)


TOPOLOGIES: dict[str, tuple[DimensionWire, ...]] = {
    "2D-SW_SW": (wire_of(16, 1200, 700, "switch"), wire_of(64, 800, 1700, "switch")),
    "3D-SW_SW_SW_homo": (
        wire_of(16, 800, 700, "switch"),
        wire_of(8, 800, 700, "switch"),
        wire_of(8, 800, 1700, "switch"),
    ),
    "3D-SW_SW_SW_hetero": (
        wire_of(16, 1600, 700, "switch"),
        wire_of(8, 800, 700, "switch"),
        wire_of(8, 400, 1700, "switch"),
    ),
    "3D-FC_Ring_SW": (
        wire_of(8, 1400, 700, "direct"),
        wire_of(16, 800, 700, "ring"),
        wire_of(8, 400, 1700, "switch"),
    ),
    "4D-Ring_SW_SW_SW": (
        wire_of(4, 2000, 20, "ring"),
        wire_of(4, 1600, 700, "switch"),
        wire_of(8, 800, 700, "switch"),
        wire_of(8, 400, 1700, "switch"),
    ),
    "4D-Ring_FC_Ring_SW": (
        wire_of(4, 3000, 20, "ring"),
        wire_of(8, 1400, 700, "direct"),
        wire_of(4, 1200, 700, "ring"),
        wire_of(8, 800, 1700, "switch"),
    ),
}
"""From inner to outer, 1,024 ranks each."""


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


def _compare(name: str, dimensions: Sequence[DimensionWire]) -> ThemisRow:
    num_ranks = math.prod(dimension.num_ranks for dimension in dimensions)
    most_per_s = sum(dimension.rate for dimension in dimensions)
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
