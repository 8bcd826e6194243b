"""Half precision on the wire: every step within the bounds of docs/how-to/half-precision.md."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dearmpi
from dearmpi.comm.world import World
from dearmpi.config import CommDtype
from tests.mpi.oracle import assert_equal_on_all_ranks, copies

LR = 0.1
UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FP32 = 1e-6  # of what sums, means and updates in fp32 are off


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 2))


def distribute(
    model: nn.Module, world: World, comm_dtype: CommDtype, **settings: Any
) -> dearmpi.DistributedOptimizer:
    return dearmpi.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR),
        model,
        world=world,
        comm_dtype=comm_dtype,
        bucket_cap_mb=3e-4,
        **settings,
    )


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    loss: Tensor = (model(torch.randn(8, 6, generator=generator)) - 1).square().mean()
    return loss


def gradients(model: nn.Module, step: int, world: World) -> dict[str, Tensor]:
    """By parameter name, every rank's gradient at the parameters as they are now: (P, ...)."""
    alone = copy.deepcopy(model)
    by_rank = []
    for rank in range(world.size):
        alone.zero_grad()
        loss_of(alone, step, rank).backward()
        by_rank.append([param.grad.double() for param in alone.parameters()])  # type: ignore[union-attr]
    names = (name for name, _ in alone.named_parameters())
    return {name: torch.stack(ranks) for name, *ranks in zip(names, *by_rank, strict=True)}


def masters(model: nn.Module, optimizer: dearmpi.DistributedOptimizer) -> dict[str, Tensor]:
    """The optimizer's own values by parameter name (collective)."""
    names = [name for name, _ in model.named_parameters()]
    entries = optimizer.state_dict()["state"]
    return {name: entries[index]["master"] for index, name in enumerate(names)}


@pytest.mark.parametrize("reduce_scatter", ["ring", "exchange"])
@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("comm_dtype", ["bf16", "fp16"])
def test_every_step_is_within_the_bound(
    comm_dtype: CommDtype, gather: str, reduce_scatter: str, world: World
) -> None:
    model = make_model()
    optimizer = distribute(model, world, comm_dtype, gather=gather, reduce_scatter=reduce_scatter)
    u = UNIT_ROUNDOFF[comm_dtype] if world.size > 1 else 0.0
    num_roundings = world.size - 1 if reduce_scatter == "ring" else 1
    keeps_masters = gather == "parameters" and world.size > 1
    values = copies(model)  # what the optimizer steps from
    for step in range(4):
        by_rank = gradients(model, step, world)
        optimizer.zero_grad()
        loss_of(model, step, world.rank).backward()
        optimizer.step()
        seen = copies(model)
        after = masters(model, optimizer) if keeps_masters else seen
        for name, before in values.items():
            mean = by_rank[name].mean(0)
            bound = ((1 + u) ** num_roundings - 1) * by_rank[name].abs().mean(0)
            if gather == "gradients":
                bound = bound + u * (mean.abs() + bound)
            bound = LR * bound + FP32 * (1 + before.abs())
            error = (after[name].double() - (before.double() - LR * mean)).abs()
            assert bool((error <= bound).all()), f"{name}: {float((error / bound).max())}"
            if keeps_masters:
                assert torch.equal(after[name].to(HALVES[comm_dtype]).float(), seen[name]), name
        assert_equal_on_all_ranks(seen, world)
        values = after
    optimizer.close()


@pytest.mark.parametrize("comm_dtype", ["bf16", "fp16"])
def test_small_updates_add_up_though_parameters_are_rounded(
    comm_dtype: CommDtype, world: World
) -> None:
    """Each is far below what half precision can tell from nothing."""
    model = nn.Linear(4, 3)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    optimizer = dearmpi.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-4), model, world=world, comm_dtype=comm_dtype
    )
    for _ in range(100):
        optimizer.zero_grad()
        sum(param.sum() for param in model.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
    optimizer.synchronize()
    for param in model.parameters():
        error = (param.detach() - 0.99).abs().max().item()
        assert error <= UNIT_ROUNDOFF[comm_dtype], error
    optimizer.close()
