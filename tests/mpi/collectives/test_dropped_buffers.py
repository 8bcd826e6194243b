"""Buffers that nobody but MPI still knows of."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from dearmpi.comm.api.collectives import Collectives, Request
from dearmpi.comm.world import World
from tests.mpi.collectives.contributions import ALGORITHMS, complete, contribution, own, total

NUM_TURNS = 2 * len(ALGORITHMS) + 2


def start_in_turn(collectives: Collectives, buffer: Tensor, number: int) -> Request:
    """One operation after the other, the same on every rank."""
    starts: list[Callable[[], Request]] = [
        *(partial(collectives.start_reduce_scatter, buffer, a) for a in ALGORITHMS),
        *(partial(collectives.start_all_gather, buffer, a) for a in ALGORITHMS),
        partial(collectives.start_all_reduce, buffer, "sum"),
        partial(collectives.start_broadcast, buffer, number % collectives.size),
    ]
    return starts[number % len(starts)]()


def assert_expected(world: World, buffer: Tensor, number: int) -> None:
    """What ``start_in_turn`` leaves: a reduce-scatter in this rank's shard, others everywhere."""
    turn, numel = number % NUM_TURNS, len(buffer)
    if turn < len(ALGORITHMS):
        whole = total(world, numel, torch.float32, number)
        assert torch.equal(own(world, buffer), own(world, whole)), number
        return
    if turn == NUM_TURNS - 2:
        whole = total(world, numel, torch.float32, number)
    elif turn == NUM_TURNS - 1:
        whole = contribution(number % world.size, numel, torch.float32, number)
    else:
        sent = [contribution(rank, numel, torch.float32, number) for rank in range(world.size)]
        shards = [each.chunk(world.size)[rank] for rank, each in enumerate(sent)]
        whole = torch.cat(shards)
    assert torch.equal(buffer, whole), number


@pytest.mark.ranks(at_least=2)
def test_buffers_that_the_caller_drops_live_until_the_operation_is_complete(
    world: World, collectives: Collectives
) -> None:
    """Ranks in turn drop the buffer they have just posted, and its memory is soon used again.

    What they sent must reach the others, and what they receive must not end up in the new owners'
    memory.
    """
    numel = 25_000 // world.size * world.size  # small enough for memory to be reused at once
    generator = torch.Generator().manual_seed(world.rank)
    for block in range(8):
        first = block * NUM_TURNS
        requests: list[Request] = []
        kept: dict[int, Tensor] = {}
        owners: list[Tensor] = []
        for number in range(first, first + NUM_TURNS):
            buffer = contribution(world.rank, numel, torch.float32, number)
            requests.append(start_in_turn(collectives, buffer, number))
            if (number + block + world.rank) % 2:
                kept[number] = buffer
            del buffer
            owners += [torch.full((numel,), 77.0) for _ in range(3)]
            if torch.rand((), generator=generator) < 0.5:
                requests[-1].test()
        gc.collect(1)
        complete(requests)
        for number, buffer in kept.items():
            assert_expected(world, buffer, number)
        assert all(bool((owner == 77.0).all()) for owner in owners)
