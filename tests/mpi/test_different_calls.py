"""Collective calls of the optimizer and of the world that differ between ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import nn

import dearmpi
from dearmpi.comm.world import World
from dearmpi.engine.optimizer import DistributedOptimizer
from dearmpi.errors import MismatchError

Action = Callable[[World, DistributedOptimizer, DistributedOptimizer, nn.Module], object]

_CALLS: dict[str, Action] = {
    "optimizer.state_dict()": lambda w, a, b, m: a.state_dict(),
    "optimizer 2.state_dict()": lambda w, a, b, m: b.state_dict(),
    "optimizer.clip_grad_norm_()": lambda w, a, b, m: a.clip_grad_norm_(1.0),
    "optimizer.scale_gradients_()": lambda w, a, b, m: a.scale_gradients_(0.5),
    "optimizer.fuse()": lambda w, a, b, m: a.fuse(1.0),
    "world.all_reduce()": lambda w, a, b, m: w.all_reduce([7.0]),
    "world.barrier()": lambda w, a, b, m: w.barrier(),
    "dearmpi.broadcast_parameters()": lambda w, a, b, m: dearmpi.broadcast_parameters(m, w),
    "DistributedOptimizer()": lambda w, a, b, m: _wrap(nn.Linear(2, 2), w),
}


def _wrap(model: nn.Module, world: World) -> DistributedOptimizer:
    optimizer = torch.optim.Adam(model.parameters())
    return dearmpi.DistributedOptimizer(optimizer, model, world=world)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(_CALLS, 2)))
def test_ranks_in_different_calls_are_told_both_and_no_number_mixes(
    world: World, one: str, other: str
) -> None:
    models = [nn.Linear(3, 2), nn.Linear(2, 2)]
    world._labels.clear()  # the session's world has seen other optimizers
    first, second = (_wrap(model, world) for model in models)
    for model, optimizer in zip(models, (first, second), strict=True):
        model(torch.ones(1, model.in_features)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(1, model.in_features)).sum().backward()
    with pytest.raises(MismatchError) as raised:
        _CALLS[one if world.is_root else other](world, first, second, models[0])
    message = str(raised.value)
    assert one.rstrip(")") in message and other.rstrip(")") in message, message
    assert message.count(f"{__file__}:") == 2, message
    assert world.all_reduce([world.rank], "max") == [world.size - 1.0]  # all are in order again


_NUMBERS: dict[str, tuple[Action, Action]] = {
    "optimizer.clip_grad_norm_(0.5, norm_type=2.0)": (
        lambda w, a, b, m: a.clip_grad_norm_(1.0),
        lambda w, a, b, m: a.clip_grad_norm_(torch.tensor(0.5)),  # type: ignore[arg-type]
    ),
    "optimizer.clip_grad_norm_(1.0, norm_type=inf)": (
        lambda w, a, b, m: a.clip_grad_norm_(1.0),
        lambda w, a, b, m: a.clip_grad_norm_(1.0, torch.inf),
    ),
    "optimizer.scale_gradients_(0.25)": (
        lambda w, a, b, m: a.scale_gradients_(0.5),
        lambda w, a, b, m: a.scale_gradients_(0.25),
    ),
}


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("other", list(_NUMBERS))
def test_ranks_that_clip_or_scale_by_different_numbers_are_told_both(
    world: World, other: str
) -> None:
    model = nn.Linear(3, 2)
    world._labels.clear()
    optimizer = _wrap(model, world)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(MismatchError) as raised:
        _NUMBERS[other][world.rank == world.size - 1](world, optimizer, optimizer, model)
    assert other in str(raised.value), raised.value
    optimizer.close()


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("num", [3, 40])
@pytest.mark.filterwarnings("error")
def test_values_that_are_not_finite_reduce_alike_on_all_ranks(
    world: World, op: Literal["sum", "max", "min"], num: int
) -> None:
    """MPI's max and min may pass over NaN on some ranks; numpy warns of sums beyond its range."""
    for holder in range(world.size):
        own = [math.nan, -math.inf, 1e308] if world.rank == holder else [1.0, math.inf, 1e308]
        reduced = world.all_reduce((own * num)[:num], op)
        first, second, third = reduced[:3]
        assert math.isnan(first)
        if world.size > 1:
            right = {"sum": math.nan, "max": math.inf, "min": -math.inf}[op]
            assert second == right or (op == "sum" and math.isnan(second))
            assert third == (math.inf if op == "sum" else 1e308)
        assert len(set(world.all_gather_text(str(reduced)))) == 1
