"""Updates are computed alike, whatever mode of torch the thread is in that drives them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import Gather, ProgressMode
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill


class Listening(TorchDispatchMode):
    """Notes which operations ran inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heard: list[str] = []

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(str(func))
        return func(*args, **(kwargs or {}))


class Mixing(torch.optim.SGD):
    """Multiplies matrices in its step, as Muon and Adafactor do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    mixed = param.grad.view(1, -1) @ param.grad.view(-1, 1)  # small on trial, too
                    assert mixed.dtype == torch.float32
        return super().step(closure)


@pytest.mark.parametrize("progress", ["thread", "poll"])
def test_updates_know_nothing_of_autocast_and_listeners(progress: ProgressMode) -> None:
    def rank(world: World) -> list[str]:
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        fill(model)
        optimizer = DistributedOptimizer(
            Mixing(model.parameters(), lr=0.1, momentum=0.9), model, world=world, bucket_cap_mb=1e-6
        )
        listening = Listening()
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16), listening:  # waits, and so drives, inside
                loss: Tensor = model(torch.ones(2, 4)).float().square().mean()
            loss.backward()
            optimizer.step()
        optimizer.close()
        return [name for name in listening.heard if "add_" in name or "mul_" in name]

    hub = FakeHub(2, seconds=lambda label, nbytes: 0.002)
    assert run_ranks(2, rank, hub=hub, progress=progress) == [[], []]


@pytest.mark.parametrize("progress", ["thread", "poll"])
def test_updates_know_nothing_of_functions_that_are_transformed(progress: ProgressMode) -> None:
    """Which wait for parameters, and so drive, while torch.func wraps all tensors."""

    def train(world: World | None) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        fill(model)
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1)
        if world is not None:
            optimizer = DistributedOptimizer(optimizer, model, world=world, bucket_cap_mb=1e-6)
        found: list[Tensor] = []
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            found.append(torch.func.jacrev(model)(torch.ones(4)).detach())
        if world is not None:
            optimizer.close()
        return [*found, *(param.detach().clone() for param in model.parameters())]

    hub = FakeHub(2, seconds=lambda label, nbytes: 0.002)
    for found in run_ranks(2, train, hub=hub, progress=progress):
        torch.testing.assert_close(found, train(None))


class Halving(torch.optim.SGD):
    """Its step is wrapped by somebody, with all of torch's marks."""

    @functools.wraps(torch.optim.SGD.step)
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.mul_(0.5)
        return super().step(closure)


def test_steps_that_somebody_has_wrapped_are_taken_whole() -> None:
    def train(world: World | None) -> Tensor:
        model = nn.Linear(3, 1)
        fill(model)
        optimizer: Any = Halving(model.parameters(), lr=0.1)
        if world is not None:
            optimizer = DistributedOptimizer(optimizer, model, world=world)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        if world is not None:
            optimizer.close()
        return model.weight.detach().clone()

    for found in run_ranks(2, train):
        torch.testing.assert_close(found, train(None))


def test_hooks_for_all_optimizers_are_called_once_for_all_buckets() -> None:
    calls: list[str] = []
    handle = register_optimizer_step_post_hook(lambda one, *_: calls.append(type(one).__name__))
    try:

        def rank(world: World) -> None:
            model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = DistributedOptimizer(inner, model, world=world, bucket_cap_mb=1e-6)
            own: list[object] = []
            inner.register_step_pre_hook(lambda one, *_: own.append(one))
            optimizer.register_step_post_hook(lambda one, *_: own.append(one))
            calls.clear()
            world.barrier()
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            assert own == [optimizer] * 6
            optimizer.close()

        run_ranks(2, rank)
    finally:
        handle.remove()
    assert calls == ["DistributedOptimizer"] * 6


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_state_and_buckets_that_are_made_in_inference_mode_can_be_updated(gather: Gather) -> None:
    """As where a checkpoint is loaded inside an evaluation."""

    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        inner = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world, gather=gather)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()

        step()
        with torch.inference_mode():
            state = optimizer.state_dict()
            optimizer.load_state_dict(state)
            optimizer.fuse(1.0)
            optimizer.synchronize()
        step()
        assert optimizer.state_dict()["state"][0]["step"] == 2
        optimizer.close()

    run_ranks(2, rank)
