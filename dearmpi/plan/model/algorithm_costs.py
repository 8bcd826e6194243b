"""Algorithm costs: what each algorithm of ``comm`` takes over P ranks, in messages and in bytes.

Each entry stands beside the one of the same name in ``comm/algorithms/registry.py``.
"""

from __future__ import annotations

from typing import Protocol

from dearmpi.config import ReduceScatter


class AlgorithmCost(Protocol):
    """Cost of a reduce-scatter, and of the all-gather that belongs to it, over P ranks."""

    def num_rounds(self, world_size: int) -> int:
        """Messages that follow each other; each adds a start-up to the time."""
        ...

    def sent_share(self, world_size: int) -> float:
        """The part of the buffer that each rank sends."""
        ...


class PairwiseCost:
    """P - 1 rounds, in each of which every rank sends one shard (Patarasuk and Yuan, 2009).

    A ring does so, and so do MPICH's own algorithms for large buffers and an exchange of shards.
    """

    def num_rounds(self, world_size: int) -> int:
        """One for each other rank."""
        return world_size - 1

    def sent_share(self, world_size: int) -> float:
        """All shards but one."""
        return (world_size - 1) / world_size


ALGORITHM_COSTS: dict[ReduceScatter, AlgorithmCost] = {
    "native": PairwiseCost(),
    "ring": PairwiseCost(),
    "exchange": PairwiseCost(),
}
