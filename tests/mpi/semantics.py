"""Semantics: one training script, run by one process with plain torch and by all ranks.

A script takes a ``Side`` and returns the tensors that must come out the same.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.torch_internals import SHOWS_FRAMES
from tests.mpi.models import NUM_FEATURES, squared_error
from tests.mpi.oracle import BATCH, copies, cut, flat_state

# How all scripts are tried: on one rank, and on even and uneven shares, for what can be gathered.
SEMANTICS = [
    pytest.mark.ranks(1, 2, 3),
    pytest.mark.parametrize("gather", ["parameters", "gradients"]),
]
_SLOW = pytest.mark.slow
# What torch compiles takes long: such scripts run on two ranks, with one gather in the fast set.
ONE_GATHER = pytest.mark.parametrize(
    "gather", ["parameters", pytest.param("gradients", marks=_SLOW)]
)
Script = Callable[["Side"], dict[str, Tensor]]
NUM_STEPS = 4
SMALL_CAP_MB = 0.0005  # some tens of parameters, so that every model has several buckets


def gather_by_turns(names: str, *cases: tuple[object, ...]) -> pytest.MarkDecorator:
    """Every case of ``names`` with either gather; in the fast set with one, by turns."""
    return pytest.mark.parametrize(
        f"{names}, gather",
        [
            pytest.param(*case, gather, marks=_SLOW if (number + turn) % 2 else ())
            for number, case in enumerate(cases)
            for turn, gather in enumerate(("parameters", "gradients"))
        ],
    )


class Side:
    """Where a script runs: alone on whole batches, or as one rank with its uneven share."""

    def __init__(self, world: World | None, **settings: Any) -> None:
        self.rank, self.size = (world.rank, world.size) if world is not None else (0, 1)
        self._world = world
        self._settings = {"bucket_cap_mb": SMALL_CAP_MB, **settings}
        self._wrapped: list[DistributedOptimizer] = []

    @property
    def is_distributed(self) -> bool:
        """Whether this is the side of dearmpi."""
        return self._world is not None

    def wrap(self, optimizer: Optimizer, model: nn.Module) -> Any:
        """``optimizer`` as this side uses it."""
        if self._world is None:
            return optimizer
        wrapped = DistributedOptimizer(optimizer, model, world=self._world, **self._settings)
        self._wrapped.append(wrapped)
        return wrapped

    def share(self, batch: Tensor) -> Tensor:
        """This side's rows of a whole batch."""
        return batch[cut(len(batch), self.size)[self.rank]]

    def inputs(self, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """This side's samples of a step, (rows, NUM_FEATURES)."""
        return self.share(whole_batch(step, dtype))

    def loss(self, model: Callable[..., Tensor], step: int) -> Any:
        """The loss whose mean over ranks is that of the whole batch."""
        dtype = torch.float64
        if isinstance(model, nn.Module):
            dtype = next(model.parameters()).dtype
        return self.average(squared_error(model(self.inputs(step, dtype))))

    def average(self, summed: Tensor) -> Any:
        """A sum over this side's samples as its part of the mean over all."""
        return summed / BATCH * self.size

    def clip(self, optimizer: Any, model: nn.Module, max_norm: float) -> Tensor:
        """Clip by the global norm, each side in its own way."""
        if self.is_distributed:
            norm: Tensor = optimizer.clip_grad_norm_(max_norm)
            return norm
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def no_sync(self, optimizer: Any) -> AbstractContextManager[None]:
        """Where the ranks do not yet reduce."""
        return optimizer.no_sync() if self.is_distributed else contextlib.nullcontext()

    def close(self) -> None:
        """Detach from the models."""
        for optimizer in self._wrapped:
            optimizer.close()


def whole_batch(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The samples of a step, (BATCH, NUM_FEATURES)."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(BATCH, NUM_FEATURES, generator=generator, dtype=torch.float64).to(dtype)


def seeded(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> Any:
    """A model with the same values at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return build().to(dtype)


def layers() -> nn.Sequential:
    """Three layers of unequal sizes, in several buckets."""
    model: nn.Sequential = seeded(
        lambda: nn.Sequential(
            nn.Linear(NUM_FEATURES, 7), nn.Tanh(), nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3)
        )
    )
    return model


def adam(model: nn.Module, lr: float = 0.01) -> Optimizer:
    """An optimizer with state whose update depends on all steps before."""
    # A larger eps than usual: it keeps rounding errors of tiny gradients small.
    return torch.optim.Adam(model.parameters(), lr=lr, eps=1e-4)


class SlowAdam(torch.optim.Adam):
    """Takes its time, so that whoever does not wait for the update is seen."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """As Adam's."""
        time.sleep(0.005)
        super().step(closure)


def slow_adam(model: nn.Module) -> SlowAdam:
    """As ``adam``, but slower."""
    return SlowAdam(model.parameters(), lr=0.01, eps=1e-4)


def train(side: Side, model: nn.Module, optimizer: Any, num_steps: int = NUM_STEPS) -> None:
    """The plain loop."""
    for step in range(num_steps):
        optimizer.zero_grad()
        side.loss(model, step).backward()
        optimizer.step()


def outcome(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Parameters, buffers and the optimizer's state."""
    return {**copies(model), **flat_state(optimizer.state_dict())}


def num_unguarded(optimizer: Any) -> int:
    """Buckets that ``step`` waits for."""
    return sum(bucket.unguarded for bucket in optimizer._built.engine._buckets)


def assert_all_guarded(optimizer: Any) -> None:
    """No bucket is left for ``step`` to wait for, in a torch that shows what it compiles."""
    assert not SHOWS_FRAMES or not num_unguarded(optimizer)


def script_of(build: Callable[[], nn.Module]) -> Script:
    """The plain loop with Adam on a model, with an evaluation after each step."""

    def script(side: Side) -> dict[str, Tensor]:
        model = seeded(build)
        optimizer = side.wrap(adam(model), model)
        seen = {}
        for step in range(NUM_STEPS):
            train(side, model.train(), optimizer, 1)
            with torch.no_grad():
                seen[f"evaluation {step}"] = model.eval()(whole_batch(9)).clone()
        return {**seen, **outcome(model, optimizer)}

    return script


def assert_same_on_both_sides(
    script: Script, world: World, *, rtol: float = 1e-10, atol: float = 1e-13, **settings: Any
) -> None:
    """Run ``script`` alone and together, and compare."""
    expected = script(Side(None))
    side = Side(world, **settings)
    found = script(side)
    side.close()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        close = torch.allclose(found[name], value, rtol=rtol, atol=atol, equal_nan=True)
        worst = (found[name].double() - value.double()).abs().max() if value.numel() else 0.0
        assert close, f"{name} differs by up to {worst}"
