"""What is sent to try a collective, what must come of it, and every way to ask for one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import get_args

import torch
from torch import Tensor

from dearmpi.comm.api.collectives import Buffer, Collectives, Request
from dearmpi.comm.world import World
from dearmpi.config import ADDED_BY_LIBRARY, ReduceScatter, WireDtype

ALGORITHMS: tuple[ReduceScatter, ...] = get_args(ReduceScatter)
ADDED_HERE = tuple(name for name in ALGORITHMS if name not in ADDED_BY_LIBRARY)
WIDE = [torch.float32, torch.float64]
HALF = [torch.bfloat16, torch.float16]
LARGE = 0  # stands for shards that make a little more than 1 MiB together
SHARDS = [1, 7, 1001, LARGE]
LIMIT_S = 60.0  # far beyond what any of this takes; reached only by a deadlock


def contribution(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """Small whole numbers, different on every rank, whose sums are exact in any dtype."""
    return ((torch.arange(numel) * 7 + rank * 3 + salt) % 11 - 5).to(dtype)


def total(world: World, numel: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    whole = torch.zeros(numel)
    for rank in range(world.size):
        whole += contribution(rank, numel, torch.float32, salt)
    return whole.to(dtype)


def whole_numel(world: World, shard: int, dtype: torch.dtype) -> int:
    return (shard or 2**20 // (world.size * dtype.itemsize) + 13) * world.size


def own(world: World, buffer: Tensor) -> Tensor:
    count = buffer.numel() // world.size
    return buffer[world.rank * count : (world.rank + 1) * count]


def scatter(
    buffer: Buffer, algorithm: ReduceScatter, wire_dtype: WireDtype | None = None
) -> Callable[[Collectives], Request]:
    return lambda c: c.start_reduce_scatter(buffer, algorithm, wire_dtype=wire_dtype)


def gather(
    buffer: Buffer, wire_dtype: WireDtype | None = None, algorithm: ReduceScatter = "ring"
) -> Callable[[Collectives], Request]:
    return lambda c: c.start_all_gather(buffer, algorithm, wire_dtype=wire_dtype)


def complete(requests: Sequence[Request]) -> None:
    """Poll ``requests`` until all are complete."""
    deadline = time.monotonic() + LIMIT_S
    left = list(requests)
    while left := [request for request in left if not request.test()]:
        assert time.monotonic() < deadline, "operations did not complete"
        time.sleep(0)
