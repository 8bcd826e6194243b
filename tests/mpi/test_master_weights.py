"""fp32 master copies behind half-precision parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dearmpi
from dearmpi.comm.world import World
from dearmpi.config import Gather
from dearmpi.engine.update.master import MasterCopy
from dearmpi.engine.update.update import WholeUpdate
from dearmpi.errors import ConfigError
from tests.codes import raises


def make_model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).to(dtype)


def distribute(
    model: nn.Module, world: World, gather: Gather, lr: float = 1e-4
) -> dearmpi.DistributedOptimizer:
    return dearmpi.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=lr),
        model,
        world=world,
        gather=gather,
        reduce_scatter="exchange",
        bucket_cap_mb=1e-4,
        master_weights=True,
    )


def train(
    model: nn.Module, optimizer: dearmpi.DistributedOptimizer, steps: range, world: World
) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        data = torch.randn(8, 6, generator=generator).to(torch.bfloat16)
        optimizer.zero_grad()
        model(data).float().square().mean().backward()
        optimizer.step()


def masters(optimizer: dearmpi.DistributedOptimizer) -> list[Tensor]:
    return [entries["master"] for _, entries in sorted(optimizer.state_dict()["state"].items())]


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_updates_too_small_for_half_precision_add_up(world: World, gather: Gather) -> None:
    model = make_model()
    start = copy.deepcopy(model.state_dict())
    optimizer = distribute(model, world, gather)
    train(model, optimizer, range(40), world)
    for master, (name, value) in zip(masters(optimizer), model.state_dict().items(), strict=True):
        assert master.dtype is torch.float32
        assert torch.equal(master.to(torch.bfloat16), value), name
        moved = (master - start[name].float()).abs().max().item()
        assert moved > 1e-3, "40 steps of 1e-4 each must not vanish in rounding"
    optimizer.close()


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_master_copies_survive_saving_and_loading(world: World, gather: Gather) -> None:
    model = make_model()
    optimizer = distribute(model, world, gather)
    train(model, optimizer, range(5), world)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(5, 9), world)
    expected = masters(optimizer)
    optimizer.close()

    again = make_model()
    resumed = distribute(again, world, gather)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(again, resumed, range(5, 9), world)
    for one, other in zip(masters(resumed), expected, strict=True):
        assert torch.equal(one, other)
    resumed.close()


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_a_state_without_masters_becomes_as_wide_as_they_are(world: World, gather: Gather) -> None:
    model = make_model()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(torch.ones(8, 6, dtype=torch.bfloat16)).float().square().mean().backward()
    plain.step()
    optimizer = distribute(model, world, gather)
    optimizer.load_state_dict(plain.state_dict())
    train(model, optimizer, range(2), world)
    for entries in optimizer.state_dict()["state"].values():
        assert entries["exp_avg"].dtype == entries["master"].dtype == torch.float32
    optimizer.close()


class Scaled(nn.Module):
    """A layer and a scalar parameter, as of a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.scale * self.layer(inputs)
        return outputs


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("inner", [torch.optim.AdamW, torch.optim.Adagrad])
def test_a_scalar_parameters_state_becomes_as_wide_as_its_master(
    world: World, inner: Callable[..., torch.optim.Optimizer], gather: Gather
) -> None:
    """Adagrad makes its state, as narrow as the parameters, when it is made."""
    model = Scaled().to(torch.bfloat16)
    plain = inner(model.parameters())
    model(torch.ones(8, 6, dtype=torch.bfloat16)).float().square().mean().backward()
    plain.step()
    for state in (None, plain.state_dict()):
        optimizer = dearmpi.DistributedOptimizer(
            inner(model.parameters()), model, world=world, gather=gather, master_weights=True
        )
        if state is not None:
            optimizer.load_state_dict(state)
        train(model, optimizer, range(2), world)
        for entries in optimizer.state_dict()["state"].values():
            assert {key: value.dtype for key, value in entries.items()} == dict.fromkeys(
                entries, torch.float32
            )
        optimizer.close()


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_a_frozen_layer_takes_no_memory_for_its_master(world: World, gather: Gather) -> None:
    def held(optimizer: dearmpi.DistributedOptimizer) -> int:
        """Bytes of all master copies."""
        found: list[MasterCopy | None] = []
        for update in optimizer._built.updates.of_buckets:
            if isinstance(update, WholeUpdate):
                found += update._masters.values()
            else:
                found += [run.master for run in update.runs]
        return sum(m.values.untyped_storage().nbytes() for m in found if m is not None)

    model: Any = make_model()
    model[0].requires_grad_(False)
    optimizer = distribute(model, world, gather)
    assert held(optimizer) == 0
    train(model, optimizer, range(2), world)
    optimizer.synchronize()
    assert held(optimizer) <= 4 * sum(param.numel() for param in model[2].parameters())
    model[0].requires_grad_(True)
    train(model, optimizer, range(2, 4), world)
    for master, value in zip(masters(optimizer), model.state_dict().values(), strict=True):
        assert torch.equal(master.to(torch.bfloat16), value)
    optimizer.close()


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_parameters_loaded_after_wrapping_are_taken_over(world: World, gather: Gather) -> None:
    model = make_model()
    optimizer = distribute(model, world, gather)
    train(model, optimizer, range(2), world)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(3.0)
    train(model, optimizer, range(2, 3), world)
    for master in masters(optimizer):
        assert (master - 3.0).abs().max() < 0.01
    optimizer.close()


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [(torch.bfloat16, {"master_weights": True}), (torch.float32, {"comm_dtype": "bf16"})],
    ids=["bf16 weights", "bf16 on the wire"],
)
def test_changing_one_element_leaves_the_others_their_digits(
    world: World, gather: Gather, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    """As a script does that clamps, or masks, after each step."""
    model = nn.Linear(8, 1, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)  # a quarter of what bf16 tells from 1
    optimizer = dearmpi.DistributedOptimizer(inner, model, world=world, gather=gather, **settings)
    for step in range(20):
        optimizer.zero_grad()
        model(torch.ones(1, 8, dtype=dtype)).sum().backward()
        optimizer.step()
        optimizer.synchronize()
        with torch.no_grad():
            model.weight[0, 0] = float(step)
    assert model.weight[0, 0] == 19.0
    torch.testing.assert_close(
        model.weight[0, 1:].float(), torch.full((7,), 0.98), rtol=0, atol=4e-3
    )
    optimizer.close()


def test_an_fp32_model_has_no_use_for_master_copies(world: World) -> None:
    with raises(ConfigError, "setting-without-effect", "master_weights"):
        distribute(make_model(torch.float32), world, "parameters")
