"""What ranks without batches take over from those that train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.engine.agreement.join import pack, unpack
from dearmpi.errors import ReplicaMismatchError, UsageError
from tests.fakes.ranks import run_ranks


@pytest.mark.parametrize("betas", [(0.9, 0.99), [0.9, 0.99]])
def test_numbers_arrive_in_the_form_that_they_had(betas: tuple[float, ...] | list[float]) -> None:
    trains = {"lr": 0.25, "betas": type(betas)(beta / 2 for beta in betas), "amsgrad": True}
    waits = {"lr": torch.tensor(0.5), "betas": betas, "amsgrad": True}
    sent = torch.maximum(pack([trains], exhausted=False), pack([waits], exhausted=True))
    [taken] = unpack([waits], sent)
    assert taken == trains
    assert type(taken["betas"]) is type(betas)
    assert isinstance(taken["lr"], torch.Tensor)


def weights(world: World, script: Callable[[nn.Module, DistributedOptimizer], None]) -> list[float]:
    """Those that ``script`` ends with."""
    model = nn.Linear(1, 1, bias=False)  # whose gradient is its input
    nn.init.zeros_(model.weight)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model, world=world
    )
    script(model, optimizer)
    optimizer.synchronize()
    values: list[float] = model.weight.flatten().tolist()
    optimizer.close()
    return values


def test_clipping_gradients_that_were_only_accumulated() -> None:
    """All that a rank tells the others about is told in the order in which they do."""

    def rank(world: World) -> list[float]:
        def script(model: nn.Module, optimizer: DistributedOptimizer) -> None:
            with optimizer.join():
                for _ in range(1 + world.rank):
                    optimizer.zero_grad()
                    with optimizer.no_sync():
                        model(torch.tensor([3.0])).sum().backward()
                        model(torch.tensor([5.0])).sum().backward()
                    optimizer.clip_grad_norm_(1.0)
                    optimizer.step()

        return weights(world, script)

    for found in run_ranks(2, rank):
        assert found == pytest.approx([-2.0], rel=1e-4)


def test_what_a_rank_has_accumulated_when_its_batches_end_takes_no_part() -> None:
    def rank(world: World) -> tuple[list[float], list[float] | None]:
        kept: list[list[float]] = []

        def script(model: nn.Module, optimizer: DistributedOptimizer) -> None:
            with optimizer.join():
                if world.rank == 0:
                    with optimizer.no_sync():
                        model(torch.tensor([100.0])).sum().backward()
                else:
                    model(torch.tensor([1.0])).sum().backward()
                    optimizer.step()
            if world.rank == 0:
                kept.extend(
                    p.grad.flatten().tolist() for p in model.parameters() if p.grad is not None
                )

        return weights(world, script), kept[0] if kept else None

    assert run_ranks(2, rank) == [([-0.5], [100.0]), ([-0.5], None)]


@pytest.mark.parametrize("num_batches", [(1, 2, 2), (3, 1, 2), (0, 0, 2), (2, 2, 0)])
@pytest.mark.parametrize("how", ["broadcast", "average"])
def test_buffers_of_ranks_without_batches_take_no_part(
    how: Any, num_batches: tuple[int, ...]
) -> None:
    """They would put old statistics in the place of new ones."""

    def rank(world: World) -> tuple[float, int]:
        norm = nn.BatchNorm1d(1, momentum=1.0)  # whose mean is that of the last batch
        optimizer = DistributedOptimizer(
            torch.optim.SGD(norm.parameters(), lr=0.0), norm, world=world, buffers=how
        )
        with optimizer.join():
            for step in range(num_batches[world.rank]):
                optimizer.zero_grad()
                norm(torch.full((2, 1), 10.0 * step + world.rank)).sum().backward()
                optimizer.step()
        optimizer.close()
        assert norm.running_mean is not None and norm.num_batches_tracked is not None
        return norm.running_mean.item(), int(norm.num_batches_tracked)

    num_steps = max(num_batches)
    last = [rank for rank, number in enumerate(num_batches) if number == num_steps]
    mean = 10.0 * (num_steps - 1) + (last[-1] if how == "broadcast" else sum(last) / len(last))
    assert run_ranks(3, rank) == [(mean, num_steps)] * 3


def test_a_join_inside_another_is_refused() -> None:
    """A rank that has no batches left would be in one of them, and the others in the other."""

    def rank(world: World) -> None:
        models = [nn.Linear(1, 1), nn.Linear(1, 1)]
        one, other = (
            DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, world=world)
            for model in models
        )
        said = r"join\(\) inside join\(\).*drop_last"
        with pytest.raises(UsageError, match=said), one.join(), other.join():
            raise AssertionError("not refused")
        with other.join():  # once the other one is left, there may be one
            pass
        for optimizer in (one, other):
            optimizer.close()

    run_ranks(2, rank)


def test_options_that_ranks_have_set_in_another_order_keep_their_places() -> None:
    def rank(world: World) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        given = {"lr": 1.0, "momentum": 0.5}
        group: dict[str, Any] = {"params": [model.weight]}
        for name in given if world.rank else reversed(given):
            group[name] = given[name]
        optimizer = DistributedOptimizer(torch.optim.SGD([group]), model, world=world)
        with optimizer.join():
            for _ in range(1 + world.rank):
                optimizer.zero_grad()
                model(torch.tensor([4.0])).sum().backward()
                optimizer.step()
        values: list[float] = model.weight.flatten().tolist()
        optimizer.close()
        return values

    # A gradient of 4, then one of 4 / 2 and half of the one before.
    assert run_ranks(2, rank) == [[-8.0]] * 2


@pytest.mark.parametrize("odd", [0, 1])
def test_options_that_one_rank_alone_has_are_named_where_the_others_would_take_them_over(
    odd: int,
) -> None:
    def rank(world: World) -> str:
        model = nn.Linear(1, 1, bias=False)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(inner, model, world=world)
        if world.rank == odd:
            torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        with pytest.raises(ReplicaMismatchError) as caught, optimizer.join():
            for _ in range(1 + world.rank):
                model(torch.tensor([3.0])).sum().backward()
                optimizer.step()
                optimizer.synchronize()
        return str(caught.value)

    said = run_ranks(2, rank)
    assert "initial_lr, " in said[odd] and "initial_lr" not in said[1 - odd]
    assert all("set the same options on every rank" in text for text in said)
