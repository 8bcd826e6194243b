"""State of half precision beside fp32 parameters: as narrow as the optimizer has chosen it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import Gather
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill

Change = Callable[[Any], None]
GATHERS = pytest.mark.parametrize("gather", ["parameters", "gradients"])


class Rounding(Optimizer):
    """Keeps its momentum in bf16; after torch's ``load_state_dict`` in fp32, as that makes it."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param, dtype=torch.bfloat16)
                state["momentum"].copy_(0.7 * state["momentum"].float() + param.grad)
                param.sub_(group["lr"] * state["momentum"].float())


class Keeping(Rounding):
    """Loads a state as it was saved, and works with no other."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        for index, entries in state_dict["state"].items():
            momentum = entries["momentum"]
            self.state[params[index]]["momentum"] = momentum.to(params[index].device, copy=True)

    def step(self, closure: Any = None) -> Any:
        assert all(entries["momentum"].dtype is torch.bfloat16 for entries in self.state.values())
        super().step()


class Model(nn.Module):
    """Two layers and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.layers = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
        fill(self.layers)

    def forward(self, inputs: Tensor) -> Any:
        return (self.layers(inputs) * self.scale).square().mean()


def train(
    world: World | None, kind: type[Rounding], change: Change, **settings: Any
) -> dict[str, Tensor]:
    """Parameters and momenta after steps before, between and after two calls of ``change``."""
    model = Model()
    optimizer: Any = kind(model.parameters())
    if world is not None:
        optimizer = DistributedOptimizer(optimizer, model, world=world, **settings)
    for number in range(6):
        if number in (2, 4):
            change(optimizer)
        optimizer.zero_grad()
        model(torch.linspace(-1.0, number, 10).reshape(2, 5)).backward()
        optimizer.step()
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for index, entries in optimizer.state_dict()["state"].items():
        found[f"momentum {index}"] = entries["momentum"].clone()
    if world is not None:
        optimizer.close()
    return found


def assert_as_alone(kind: type[Rounding], change: Change, **settings: Any) -> None:
    """Bit by bit, since every rank has the same batches."""
    expected = train(None, kind, change if change is reload else leave)
    for found in run_ranks(2, lambda world: train(world, kind, change, **settings)):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name


def leave(optimizer: Any) -> None:
    """Change nothing."""


def fuse(optimizer: Any) -> None:
    optimizer.fuse(1.0 if len(optimizer.layout) > 1 else 0.0001)


def reload(optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@GATHERS
@pytest.mark.parametrize("kind", [Rounding, Keeping])
def test_other_buckets_leave_the_state_as_it_is(kind: type[Rounding], gather: Gather) -> None:
    assert_as_alone(kind, fuse, gather=gather, bucket_cap_mb=0.0001)


@GATHERS
@pytest.mark.parametrize("kind", [Rounding, Keeping])
def test_a_loaded_state_is_what_the_wrapped_optimizer_makes_of_it(
    kind: type[Rounding], gather: Gather
) -> None:
    assert_as_alone(kind, reload, gather=gather)


@GATHERS
def test_masters_go_on_beside_a_state_that_is_narrower(gather: Gather) -> None:
    """Of parameters in bf16, of which the optimizer sees copies in fp32."""

    def rank(world: World) -> None:
        model = nn.Linear(3, 4).bfloat16()
        fill(model)
        inner = Keeping(model.parameters())
        optimizer = DistributedOptimizer(
            inner, model, world=world, gather=gather, master_weights=True
        )
        for change in (leave, reload, fuse, leave):
            change(optimizer)
            optimizer.zero_grad()
            model(torch.ones(2, 3, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
        for entries in optimizer.state_dict()["state"].values():
            assert entries["momentum"].dtype is torch.bfloat16
            assert entries["master"].dtype is torch.float32
        optimizer.close()

    run_ranks(2, rank)


class Mixed(nn.Module):
    """A layer in bf16, beside one in fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(3, 2).bfloat16(), nn.Linear(3, 2).to(dtype)
        fill(self)

    def forward(self, inputs: Tensor) -> Any:
        layers = (self.narrow, self.wide)
        outputs = [layer(inputs.to(layer.weight.dtype)).float() for layer in layers]
        return (outputs[0] * outputs[1]).square().mean()


@GATHERS
def test_parameters_without_masters_have_a_loaded_state_as_wide_as_they_are(gather: Gather) -> None:
    """Also beside some that have them, of which torch loads no state itself."""
    earlier = Mixed(torch.bfloat16)
    saving = torch.optim.Adam(earlier.parameters(), lr=0.1)
    earlier(torch.ones(2, 3)).backward()
    saving.step()

    def rank(world: World) -> None:
        model = Mixed(torch.float32)
        adam = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(
            adam, model, world=world, gather=gather, master_weights=True
        )
        optimizer.load_state_dict(copy.deepcopy(saving.state_dict()))
        model(torch.ones(2, 3)).backward()
        optimizer.step()
        for entries in optimizer.state_dict()["state"].values():
            assert entries["exp_avg"].dtype is torch.float32
            assert float(entries["step"]) == 2.0
        optimizer.close()

    run_ranks(2, rank)
