"""What updates during backprop do not allow is refused, and never wrong in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.errors import UsageError
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.mpi.oracle import Case, Training


def test_an_eager_second_backprop_is_refused() -> None:
    def rank(world: World) -> None:
        training = Training(Case(eager=True, cap_mb=1.0), world)
        training.step(0)
        training.backward(1)
        with raises(UsageError, "eager-forbids", "eager"):
            training.backward(2)

    run_ranks(2, rank)


def test_an_eager_backprop_of_a_layer_in_two_reentrant_checkpoints_is_told_apart() -> None:
    """The script has one backward."""

    def rank(world: World) -> None:
        model = nn.Linear(3, 3)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world, eager=True)
        hidden = torch.ones(1, 3, requires_grad=True)
        for _ in range(2):
            hidden = checkpoint(model, hidden, use_reentrant=True)
        with raises(UsageError, "eager-forbids", "use_reentrant", "use_reentrant=False"):
            hidden.sum().backward()
            optimizer.step()

    run_ranks(2, rank)


def test_an_eager_update_of_what_backprop_still_needs_is_no_silent_one() -> None:
    """A head that an early exit uses without training it: its gradient is there before that."""

    def rank(world: World) -> None:
        trunk, head = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        model = nn.Sequential(trunk, head)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world, eager=True, bucket_cap_mb=1e-6)
        halfway = trunk(torch.ones(1, 3))
        early = nn.functional.linear(halfway, head.weight.detach())
        late = head(halfway)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (early.square().sum() + late.square().sum()).backward()
        optimizer.step()
        optimizer.close()

    run_ranks(2, rank)


@pytest.mark.parametrize("act", ["zero_grad", "clip"])
def test_eager_gradients_can_be_neither_dropped_nor_clipped(act: str) -> None:
    def rank(world: World) -> None:
        training = Training(Case(eager=True), world)
        training.step(0)
        training.backward(1)
        with raises(UsageError, "eager-forbids", "eager=False"):
            training.optimizer.zero_grad() if act == "zero_grad" else training.clip(2.0)

    run_ranks(2, rank)


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)])
@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_eager_options_are_not_set_too_late(gather: Any, rate: float | torch.Tensor) -> None:
    """Such as a learning rate by the loss, which some buckets would have and others not."""

    def rank(world: World) -> float:
        model = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=rate)
        optimizer = DistributedOptimizer(inner, model, world=world, gather=gather, eager=True)
        for factor in (0.5, 0.1):
            (group,) = optimizer.param_groups
            model(torch.ones(1, 3)).sum().backward()
            before, group["lr"] = group["lr"], group["lr"] * factor
            with raises(UsageError, "eager-forbids", "group 0", "lr in param group 0"):
                optimizer.step()
            group["lr"] = before
            optimizer.step()
            group["lr"] = group["lr"] * factor
        optimizer.close()
        return model.weight.sum().item()

    assert run_ranks(2, rank) == [pytest.approx(-3 * (0.5 + 0.25))] * 2
