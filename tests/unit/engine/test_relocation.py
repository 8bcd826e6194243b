"""Relocation: state comes to the ranks that a new layout makes its owners, and to no others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.ranks import run_ranks
from dearmpi.comm.world import World
from dearmpi.config import ProgressMode
from dearmpi.engine.relocation import stretches
from dearmpi.plan.layout import ParamSpec, build_layout
from tests.mpi.oracle import OPTIMIZERS

BUFFERS = ("gradients", "parameters")


class Model(nn.Module):
    """Parameters of several sizes, a scalar among them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.layers = nn.Sequential(nn.Linear(5, 31), nn.Tanh(), nn.Linear(31, 7))
        for param in self.layers.parameters():  # threads would draw from one generator
            param.data = torch.linspace(-0.3, 0.4, param.numel()).reshape(param.shape)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(inputs) * self.scale
        return output


def trained(world: World, optimizer: str, **settings: Any) -> DistributedOptimizer:
    """After two steps, with buckets of some tens of elements."""
    model = Model()
    wrapped = DistributedOptimizer(
        OPTIMIZERS[optimizer](model.parameters()),
        model,
        world=world,
        bucket_cap_mb=0.0003,
        **settings,
    )
    take_steps(wrapped, 2)
    return wrapped


def take_steps(wrapped: DistributedOptimizer, num_steps: int) -> None:
    for step in range(num_steps):
        wrapped.zero_grad()
        wrapped._model(torch.linspace(-1, step, 10).reshape(2, 5)).square().sum().backward()
        wrapped.step()


def flat(state_dict: dict[str, Any]) -> dict[str, Tensor]:
    return {
        f"{index} {key}": torch.as_tensor(value)
        for index, entries in state_dict["state"].items()
        for key, value in entries.items()
    }


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("optimizer", ["adam", "nadam", "sgd"])
@pytest.mark.parametrize("size", [2, 5])
def test_no_bit_of_the_state_changes(size: int, optimizer: str, gather: str) -> None:
    def rank(world: World) -> None:
        wrapped = trained(world, optimizer, gather=gather)
        before, seen = flat(wrapped.state_dict()), {len(wrapped.layout)}
        for cap_mb in (0.0008, 1.0, 0.0002):
            wrapped.fuse(cap_mb)
            seen.add(len(wrapped.layout))
            after = flat(wrapped.state_dict())
            assert after.keys() == before.keys()
            for name, value in before.items():
                assert torch.equal(after[name], value), name
                assert after[name].dtype == value.dtype and after[name].shape == value.shape
        assert len(seen) > 2
        wrapped.close()

    run_ranks(size, rank)


@pytest.mark.parametrize("progress", ["thread", "poll"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"eager": True}, {"comm_dtype": "bf16"}, {"gather": "gradients"}],
    ids=lambda settings: next(iter(settings), "defaults"),
)
def test_training_goes_on_with_state_that_nobody_has_read(
    settings: dict[str, Any], progress: ProgressMode
) -> None:
    """Several layouts in a row, each before the state of the one before has been asked for."""

    def outcome(world: World, *layouts: Sequence[float]) -> dict[str, Tensor]:
        wrapped = trained(world, "adam", **settings)
        for caps_mb in layouts:
            for cap_mb in caps_mb:
                wrapped.fuse(cap_mb)
            take_steps(wrapped, 1)
        wrapped.close()
        return flat(wrapped.state_dict())

    def rank(world: World) -> None:
        stayed, moved = outcome(world, (), (), ()), outcome(world, (0.0008,), (0.0002, 1.0), ())
        assert moved.keys() == stayed.keys()
        for name, value in stayed.items():
            assert torch.equal(moved[name], value), name

    run_ranks(2, rank, progress=progress)


def test_a_rank_sends_no_more_than_its_own_share(monkeypatch: pytest.MonkeyPatch) -> None:

    def rank(world: World) -> int:
        wrapped = trained(world, "adam")
        gathered: list[int] = []
        monkeypatch.setattr(World, "all_gather", lambda *_: gathered.append(1))
        world.barrier()
        wrapped.fuse(1.0)
        assert not gathered, "a whole state was gathered"
        monkeypatch.undo()
        world.barrier()
        state = wrapped.local_state()
        wrapped.close()
        return sum(tensor.numel() for piece in state.pieces for tensor in piece.tensors.values())

    held = run_ranks(3, rank)
    whole = 2 * sum(param.numel() for param in Model().parameters())
    assert sum(held) == whole and max(held) <= -(-whole // 3) + 2


def test_the_old_buffers_are_gone_at_once() -> None:
    """They are as large as the model, and Python may take its time to look for cycles."""

    def rank(world: World) -> None:
        wrapped = trained(world, "adam")
        updates = wrapped._assembly.updates
        old = [weakref.ref(getattr(u.bucket, n).data) for u in updates for n in BUFFERS]
        del updates
        wrapped.fuse(1.0)
        assert all(reference() is None for reference in old)
        wrapped.close()

    gc.disable()
    try:
        run_ranks(2, rank)
    finally:
        gc.enable()


def test_every_element_of_a_parameter_has_one_owner() -> None:
    specs = [ParamSpec(f"p{n}", (n,)) for n in (1, 7, 30, 2)]
    for bucket in build_layout([specs], 4):
        for placed in bucket.placements:
            parts = stretches(bucket, placed)
            assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
            assert parts[-1].stop == placed.spec.numel
            for part in parts:
                first, last = bucket.shard_range(part.rank)
                assert first <= placed.start + part.start < placed.start + part.stop <= last
