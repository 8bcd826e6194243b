"""Modules of torch's own that count on torch.distributed are refused where they would go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from dearmpi import DistributedOptimizer, convert_sync_batchnorm
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from tests.codes import raises
from tests.fakes.ranks import run_ranks


@contextmanager
def process_group(size: int) -> Iterator[None]:
    """Torch's, of so many ranks, that communicates nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def wrap(model: nn.Module, world: World) -> DistributedOptimizer:
    return DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, world=world)


def normalised() -> nn.Module:
    """As scripts for DistributedDataParallel make it."""
    plain = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.BatchNorm1d(4)))
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    return converted


def test_models_that_come_and_go_share_what_their_layers_communicate_by() -> None:
    """MPI has some two thousand communicators, and nothing tells that a layer is gone."""

    def rank(world: World) -> None:
        before = world.progress.num_lanes
        for _ in range(3):
            model = convert_sync_batchnorm(
                nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)), world
            )
            found = model(torch.arange(6.0).view(2, 3) * (1 + world.rank))
            assert torch.isfinite(found).all()
        assert world.progress.num_lanes == before + 1

    run_ranks(2, rank)


def test_torchs_sync_batch_norm_that_nobody_synchronises_is_refused() -> None:
    """It would be an ordinary one."""

    def rank(world: World) -> None:
        model = normalised()
        told = r"module 1\.0 is torch's SyncBatchNorm.* is not init.*dearmpi\.convert_sync_batchn"
        with pytest.raises(ConfigError, match=told):
            wrap(model, world)
        wrap(convert_sync_batchnorm(model, world), world).close()

    run_ranks(2, rank)
    run_ranks(1, lambda world: wrap(normalised(), world).close())


def test_torchs_sync_batch_norm_that_torch_synchronises_is_left_to_it() -> None:
    def refused(world: World) -> None:
        with raises(ConfigError, "module-not-served", "torch.distributed"):
            wrap(normalised(), world)

    with process_group(2):
        run_ranks(2, lambda world: wrap(normalised(), world).close())
    with process_group(1):
        run_ranks(2, refused)


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_that_averages_gradients_by_itself_is_refused(inside: bool) -> None:
    """Two of a kind would reduce each gradient."""

    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        parallel: nn.Module = nn.parallel.DistributedDataParallel(model)
        if inside:
            parallel = nn.Sequential(parallel)
        who = "module 0 of the model" if inside else "the model"
        told = rf"{who} is a DistributedDataParallel.*leave it out.*\(model\.module\)"
        with pytest.raises(ConfigError, match=told):
            wrap(parallel, world)
        wrap(model, world).close()

    with process_group(2):
        run_ranks(2, rank)
