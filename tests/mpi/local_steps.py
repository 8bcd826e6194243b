"""Local steps twice: by all ranks with dearmpi, and by one process that plays every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dearmpi import EngineConfig, LocalOptimizer
from dearmpi.comm.world import World
from tests.mpi.models import NUM_FEATURES, build_model

SMALL = EngineConfig(bucket_cap_mb=0.0003)  # several buckets of a small model
Inner = Callable[[Any], torch.optim.Optimizer]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of ``LocalOptimizer``, and the model and inner optimizer."""

    sync_every: int = 4
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    model: str = "dense"
    inner: Inner = adamw

    def optimizer(self, model: nn.Module, world: World, **more: Any) -> LocalOptimizer:
        """Of the ranks of ``world``."""
        settings = {
            "sync_every": self.sync_every,
            "outer_lr": self.outer_lr,
            "outer_momentum": self.outer_momentum,
            "fragments": self.fragments,
            "delay": self.delay,
            "mix": self.mix,
            "compress": "none",
            "config": SMALL,
        }
        return LocalOptimizer(
            self.inner(model.parameters()), model, world=world, **{**settings, **more}
        )


def backward(model: Any, step: int, rank: int) -> None:
    """Gradients of this rank's samples."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(3, NUM_FEATURES, generator=generator, dtype=torch.float64).to(model.dtype)
    model.zero_grad()
    (model(x, torch.ones(3, dtype=torch.bool)) / 3).backward()


def steps_of(model: Any, optimizer: LocalOptimizer, steps: range) -> None:
    """Train this rank."""
    for step in steps:
        backward(model, step, optimizer.world.rank)
        optimizer.step()


def simulate(
    case: Case, fragments: tuple[tuple[str, ...], ...], *, size: int, num_steps: int
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """One process plays ``size`` ranks; the parameters of each, and the shared values."""
    models = [build_model(case.model) for _ in range(size)]
    optimizers = [case.inner(model.parameters()) for model in models]
    ranks = [dict(model.named_parameters()) for model in models]
    anchor = {name: param.detach().clone() for name, param in ranks[0].items()}
    velocity = {name: torch.zeros_like(value) for name, value in anchor.items()}
    merges: tuple[tuple[str, ...], int] | None = None

    def merge(names: tuple[str, ...]) -> None:
        for params in ranks:
            for name in names:
                value = case.mix * params[name].data + (1 - case.mix) * anchor[name]
                params[name].data.copy_(value)

    for step in range(1, num_steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            backward(model, step - 1, rank)
            optimizer.step()
        if merges is not None and merges[1] == step:
            merge(merges[0])
        for number, names in enumerate(fragments):
            offset = round(number * case.sync_every / len(fragments) + 1e-9)
            if step % case.sync_every != offset:
                continue
            for name in names:
                delta = torch.stack([anchor[name] - params[name].data for params in ranks]).mean(0)
                velocity[name] = case.outer_momentum * velocity[name] + delta
                nesterov = delta + case.outer_momentum * velocity[name]
                anchor[name] = anchor[name] - case.outer_lr * nesterov
            merges = (names, step + case.delay)
            if not case.delay:
                merge(names)
    return [copy.deepcopy(model).state_dict() for model in models], anchor
