"""Ranks with unequal numbers of batches train together inside ``join``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

import dearmpi
from dearmpi.comm.world import World
from dearmpi.config import Gather, ScheduleName
from dearmpi.errors import UsageError
from tests.codes import raises

STEPS = 6


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


def num_batches(rank: int) -> int:
    """Rank 0 has the most; the others end one after the other."""
    return max(1, STEPS - 2 * rank)


def one_but_on_rank_0(rank: int) -> int:
    return 1 if rank else STEPS


def none_but_on_rank_0(rank: int) -> int:
    return 0 if rank else STEPS


def reference(
    size: int,
    max_norm: float | None,
    *,
    num_epochs: int = 1,
    gamma: float = 0.7,
    counts: Callable[[int], int] = num_batches,
) -> nn.Module:
    """One process: the mean over all ranks, those without a batch counting as zero."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = ExponentialLR(optimizer, gamma)
    for step in [*range(STEPS)] * num_epochs:
        optimizer.zero_grad()
        for rank in range(size):
            if step < counts(rank):
                (model(batch(step, rank)).square().mean() / size).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm * (1 + step))
        optimizer.step()
        scheduler.step()
    return model


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("max_norm", [None, 0.01])
@pytest.mark.parametrize("schedule", ["dear", "wfbp", "serial"])
def test_ranks_without_batches_follow_the_others_schedule_and_clipping(
    world: World, gather: Gather, max_norm: float | None, schedule: ScheduleName
) -> None:
    model = make_model()
    optimizer = dearmpi.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.1),
        model,
        world=world,
        gather=gather,
        schedule=schedule,
        bucket_cap_mb=1e-4,
    )
    scheduler = ExponentialLR(optimizer, 0.7)
    with optimizer.join():
        for step in range(num_batches(world.rank)):
            optimizer.zero_grad()
            model(batch(step, world.rank)).square().mean().backward()
            if max_norm is not None:
                optimizer.clip_grad_norm_(max_norm * (1 + step))
            optimizer.step()
            scheduler.step()
    expected = reference(world.size, max_norm).state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)
    optimizer.close()


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("counts", [one_but_on_rank_0, none_but_on_rank_0])
@pytest.mark.parametrize("check_every", [0, 1, 2])
def test_a_rank_that_has_waited_clips_in_later_epochs_as_often_as_the_others(
    world: World, counts: Callable[[int], int], check_every: int
) -> None:
    model = make_model()
    optimizer = dearmpi.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.1), model, world=world, check_every=check_every
    )
    for _ in range(2):
        with optimizer.join():
            # One step: the last of an epoch is also the first after those that it waited through.
            for step in range(counts(world.rank)):
                optimizer.zero_grad()
                model(batch(step, world.rank)).square().mean().backward()
                optimizer.clip_grad_norm_(0.01 * (1 + step))
                optimizer.step()
    expected = reference(world.size, 0.01, num_epochs=2, gamma=1.0, counts=counts).state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)
    optimizer.close()


@pytest.mark.ranks(at_least=2)
def test_what_a_joined_rank_cannot_follow_is_refused(world: World) -> None:
    model = make_model()
    optimizer = dearmpi.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, world=world
    )
    with optimizer.join():
        model(batch(0, world.rank)).sum().backward()
        with raises(UsageError, "join-misused", "dropping gradients", "inside join"):
            optimizer.zero_grad()
        optimizer.step()
    with raises(UsageError, "join-misused", "backward that no step"), optimizer.join():
        model(batch(0, world.rank)).sum().backward()
    optimizer.step()
    with raises(UsageError, "join-misused", "second backprop", "inside join"), optimizer.join():
        model(batch(0, world.rank)).sum().backward()
        model(batch(0, world.rank)).sum().backward()
