"""Rings of ranks that are dealt out to hosts in turn: they go host by host."""

from __future__ import annotations

import pytest
import torch

from dearmpi.comm.world import World
from tests.mpi.collectives.contributions import complete, contribution, own, total, whole_numel


@pytest.mark.ranks(at_least=3)  # two are neighbours in any order
@pytest.mark.parametrize("shard", [1, 1001])
def test_every_rank_has_its_shard_of_the_sum_and_then_all_of_it(
    world: World, monkeypatch: pytest.MonkeyPatch, shard: int
) -> None:
    from dearmpi.comm.backends import mpi

    if not mpi.supports_threads():
        pytest.skip("a second driver needs MPI_THREAD_MULTIPLE")
    monkeypatch.setattr("mpi4py.MPI.Get_processor_name", lambda: f"n{world.rank % 2}")
    collectives = mpi.connect()
    assert collectives.hosts == tuple(f"n{rank % 2}" for rank in range(world.size))
    numel = whole_numel(world, shard, torch.float32)
    buffers = [contribution(world.rank, numel, torch.float32, salt) for salt in range(3)]
    complete([collectives.start_reduce_scatter(buffer, "ring") for buffer in buffers])
    wholes = [total(world, numel, torch.float32, salt) for salt in range(3)]
    for buffer, whole in zip(buffers, wholes, strict=True):
        assert torch.equal(own(world, buffer), own(world, whole))
    complete([collectives.start_all_gather(buffer, "ring") for buffer in buffers])
    assert all(torch.equal(*both) for both in zip(buffers, wholes, strict=True))
