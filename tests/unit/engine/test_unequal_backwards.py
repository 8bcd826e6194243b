"""Ranks whose backwards differ between two steps are told so, and do not wait for ever."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer, SyncBatchNorm
from dearmpi.comm.world import World
from dearmpi.errors import CommError, UsageError
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill

UNEQUAL = "some ranks have reduced gradients once more than others"


def make(world: World) -> tuple[nn.ModuleList, DistributedOptimizer]:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    fill(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, DistributedOptimizer(inner, model, world=world, bucket_cap_mb=1e-6)


def backward(part: nn.Module) -> None:
    layers = part if isinstance(part, nn.ModuleList) else [part]
    outputs = torch.ones(1, 3)
    for layer in layers:
        outputs = layer(outputs)
    outputs.square().mean().backward()


def test_a_second_backward_through_the_same_layers_on_one_rank_only() -> None:
    def rank(world: World) -> None:
        model, optimizer = make(world)
        backward(model[0])
        backward(model[world.rank])
        with pytest.raises(CommError, match=UNEQUAL):
            optimizer.step()
            optimizer.synchronize()

    run_ranks(2, rank)


def test_a_step_that_one_rank_leaves_out_before_its_backward_and_others_after_it() -> None:
    def rank(world: World) -> None:
        model, optimizer = make(world)
        for number in range(3):
            optimizer.zero_grad()
            if number == 1:  # as where rank 0's forward fails, and all agree to go on
                if world.rank:
                    for part in model:
                        backward(part)
                continue
            for part in model:
                backward(part)
            optimizer.step()
        optimizer.synchronize()

    with pytest.raises(CommError, match=UNEQUAL):
        run_ranks(2, rank)


def test_ranks_that_train_different_layers() -> None:
    """As where each draws the layers to be trained with a seed of its own."""

    def rank(world: World) -> None:
        model, optimizer = make(world)
        model[world.rank].requires_grad_(False)
        backward(model[1 - world.rank])
        with pytest.raises(CommError, match="ranks train different parameters in this step"):
            optimizer.step()
            optimizer.synchronize()

    run_ranks(2, rank)


def test_closing_after_a_backward_that_went_through_other_layers_elsewhere() -> None:
    def rank(world: World) -> None:
        model, optimizer = make(world)
        backward(model)
        optimizer.step()
        for part in list(model)[world.rank :]:
            backward(part)
        optimizer.close()

    run_ranks(2, rank)


def test_unequal_batches_with_layers_that_wait_for_all_ranks() -> None:
    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(3, 3), SyncBatchNorm(3, world=world))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world)
        with raises(UsageError, "join-misused", "SyncBatchNorm"), optimizer.join():
            pass

    run_ranks(2, rank)
