"""A model that is trained in parts: what the tests of narrow messages save and resume."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from tests.mpi.models import fill
from tests.mpi.oracle import OPTIMIZERS, copies, fingerprint

Saved = tuple[dict[str, Tensor], dict[str, Any]]


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.3)))
    fill(model)
    return model


def distribute(model: nn.Module, world: World, **settings: Any) -> DistributedOptimizer:
    settings = {"inner": "adam", "bucket_cap_mb": 1e-4, **settings}
    inner = OPTIMIZERS[settings.pop("inner")](model.parameters())
    return DistributedOptimizer(inner, model, world=world, **settings)


def train(model: nn.Module, optimizer: Any, steps: range, world: World) -> None:
    """The last layer has no gradient before step 3."""
    for step in steps:
        data = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + world.rank))
        optimizer.zero_grad()
        outputs = model(data) if step >= 3 else model[1](model[0](data))  # type: ignore[index]
        (model.scale * outputs).square().mean().backward()
        optimizer.step()


def resume(
    steps: range, start: Saved | None = None, **settings: Any
) -> Callable[[World], tuple[Saved, str]]:
    """What a rank does: train from ``start`` on; gives what would be saved, and a digest of it."""

    def rank(world: World) -> tuple[Saved, str]:
        model = make_model()
        if start is not None:
            model.load_state_dict(start[0])
        optimizer = distribute(model, world, **settings)
        if start is not None:
            optimizer.load_state_dict(copy.deepcopy(start[1]))
        train(model, optimizer, steps, world)
        found = copy.deepcopy((copies(model), optimizer.state_dict()))
        entries = {
            f"{index}.{key}": torch.as_tensor(value)
            for index, state in found[1]["state"].items()
            for key, value in state.items()
        }
        optimizer.close()
        return found, fingerprint(found[0]) + fingerprint(entries)

    return rank


def masters_of(saved: Saved) -> list[Tensor]:
    return [entries["master"] for _, entries in sorted(saved[1]["state"].items())]
