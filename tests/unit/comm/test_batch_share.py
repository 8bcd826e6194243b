"""world.batch_share: what ranks agree on, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError, MismatchError
from tests.codes import raises
from tests.fakes.ranks import run_ranks

BATCHES = ((0, 10), (10, 3), (0, 10))  # first sample and number of samples of each step


@pytest.mark.parametrize("shares", ["even", (3, 2, 1), (1.0, 1.0, 4.5)], ids=str)
def test_a_weighted_loss_gives_the_gradient_of_the_whole_batch(shares: Any) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(13, 4).double(), torch.randn(13, 1).double()
    start = nn.Linear(4, 1).double()

    def train(world: World, shares: Any) -> list[Tensor]:
        model = nn.Linear(4, 1).double()
        model.load_state_dict(start.state_dict())
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(inner, model, world=world)
        share = world.batch_share(10, shares)
        for first, count in BATCHES:
            one = share.of(count)
            mine = slice(first + one.start, first + one.stop)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs[mine]), targets[mine])
            torch.autograd.backward(one.weight * loss)
            optimizer.step()
        optimizer.synchronize()
        return [param.detach().clone() for param in model.parameters()]

    (alone,) = run_ranks(1, lambda world: train(world, "even"))
    for found in run_ranks(3, lambda world: train(world, shares)):
        for ours, theirs in zip(found, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_rank_0_decides_by_measured_seconds_and_keeps_what_is_good() -> None:
    def body(world: World) -> list[tuple[int, ...]]:
        speed = (1.0, 2.0, 1.0)[world.rank]
        share = world.batch_share(30, "auto")
        found = [share.sizes]
        for _ in range(3):
            seconds = speed * share.size / 10
            share = world.batch_share(30, "auto", before=share, seconds=seconds)
            found.append(share.sizes)
        return found

    even, fitted = (10, 10, 10), (12, 6, 12)
    assert run_ranks(3, body) == [[even, fitted, fitted, fitted]] * 3


@pytest.mark.parametrize(
    ("batch_size", "shares", "code", "numbers"),
    [
        (8, (1, 2, 3), "settings-contradict", (3, "2 ranks")),
        (8, (1, -2), "out-of-range", ("rank 1", -2)),
        (8, (0, 0), "out-of-range", ("rank 0", 0)),
        (8, (1, 0), "out-of-range", ("rank 1", 0)),
        (8, (1e308, 1e308), "out-of-range", ("not finite",)),
        (8, (100, 1), "batch-too-small", ("rank 1", "0 of 8")),
        (1, "even", "batch-too-small", (1, "2 ranks")),
        (8, "most", "unknown-choice", ("most",)),
        (8, 2, "wrong-type", (2, "int")),
        (8, (1, "a"), "wrong-type", ("'a'",)),
        (8, torch.ones(2), "wrong-type", ("Tensor",)),
        (2.5, "even", "wrong-type", (2.5, "float")),
    ],
)
def test_shares_that_leave_a_rank_without_samples_are_refused(
    batch_size: Any, shares: Any, code: str, numbers: tuple[Any, ...]
) -> None:
    def body(world: World) -> None:
        with raises(ConfigError, code, *numbers):
            world.batch_share(batch_size, shares)

    run_ranks(2, body)


def test_ranks_that_disagree_learn_of_it() -> None:
    def body(world: World) -> None:
        shares = (2.0, 1.0) if world.rank else (1.0, 2.0)
        with raises(MismatchError, "ranks-built-differently", "rank 0", "rank 1", "[1.0, 2.0]"):
            world.batch_share(12, shares)

    run_ranks(2, body)
