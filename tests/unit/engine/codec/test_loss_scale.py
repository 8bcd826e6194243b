"""A scaled loss: what waits for later steps follows the scale; nothing is lost or counted twice.

Scales are powers of two, by which all numbers but the smallest are multiplied exactly. So a run
with a scaler must equal one without it to the bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dearmpi import DistributedOptimizer, GradScaler
from dearmpi.comm.world import World
from dearmpi.engine.bucket import bucket
from tests.combinations import turns_of
from tests.fakes.ranks import run_ranks
from tests.mpi.oracle import copies
from tests.unit.engine.test_compress import make_wide_model

KEEPING: list[dict[str, Any]] = [
    {"compress": "random-block", "density": 0.1},
    {"compress": "topk", "density": 0.1, "error_feedback": "ef21"},
    {"compress": "powersgd", "gather": "gradients", "powersgd_rank": 2},
    {"compress": "sketch"},
    {"compress": "block-topk", "density": 0.1},
    {"compress": "random-k", "density": 0.1, "error_feedback": "ef21", "compress_after": 2},
]


@pytest.fixture(autouse=True)
def _small_buckets_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bucket, "_LEAST_COMPRESSED", 1)
    yield


def loss_of(model: torch.nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    loss: Tensor = model(torch.randn(4, 40, generator=generator)).square().mean()
    return loss


def train(world: World, steps: range, start: Any, scaler: Any, **settings: Any) -> Any:
    """Steps, of which the scaled run skips one more that is not finite on the last rank alone."""
    model = make_wide_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    optimizer = DistributedOptimizer(inner, model, world=world, **settings)
    if start is not None:
        model.load_state_dict(start[0])
        optimizer.load_state_dict(copy.deepcopy(start[1]))
    if scaler is not None:
        optimizer.follow_loss_scale(scaler.get_scale)
    for step in steps:
        optimizer.zero_grad()
        if scaler is None:
            loss_of(model, step, world.rank).backward()
            optimizer.step()
            continue
        if step == 3:
            factor = math.inf if world.rank == world.size - 1 else 1.0
            (factor * scaler.scale(loss_of(model, 99, world.rank))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scaler.scale(loss_of(model, step, world.rank)).backward()
        scaler.step(optimizer)
        scaler.update()
    state = copy.deepcopy(optimizer.state_dict())
    found = copies(model), state
    optimizer.close()
    return found


@turns_of(settings=KEEPING, size=[2, 3])
def test_a_scaler_changes_no_bit(settings: dict[str, Any], size: int) -> None:
    def rank(world: World) -> list[dict[str, Tensor]]:
        ends = []
        for scaler in (None, GradScaler("cpu", init_scale=8.0, growth_interval=2)):
            middle = train(world, range(6), None, scaler, **settings)
            ends.append(train(world, range(6, 9), middle, scaler, **settings)[0])
        assert scaler is not None and scaler.get_scale() > 8.0
        return ends

    for plain, scaled in run_ranks(size, rank):
        assert all(torch.equal(scaled[name], value) for name, value in plain.items())


def test_a_scaler_is_followed_without_being_named_and_in_a_new_layout() -> None:
    def rank(world: World) -> list[dict[str, Tensor]]:
        ends = []
        for scaler in (None, GradScaler("cpu", init_scale=8.0, growth_interval=2)):
            model = make_wide_model()
            inner = torch.optim.SGD(model.parameters(), lr=0.02)
            optimizer = DistributedOptimizer(inner, model, world=world, compress="topk")
            for step in range(8):
                optimizer.zero_grad()
                loss = loss_of(model, step, world.rank)
                if scaler is None:
                    loss.backward()
                    optimizer.step()
                else:
                    scaler.scale(loss).backward()
                    scaler.unscale_(optimizer)
                    optimizer.clip_grad_norm_(1e9)
                    scaler.step(optimizer)
                    scaler.update()
                if step == 4:
                    optimizer.fuse(0.004)
            ends.append(copies(model))
            optimizer.close()
        return ends

    for plain, scaled in run_ranks(2, rank):
        assert all(torch.equal(scaled[name], value) for name, value in plain.items())
