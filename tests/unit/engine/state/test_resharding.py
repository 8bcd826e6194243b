"""Resharding: state comes to the ranks that a new layout makes its owners, and to no others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.api.collectives import Collectives, Request
from dearmpi.comm.world import World
from dearmpi.config import ProgressMode
from dearmpi.engine.iteration import stages
from dearmpi.engine.state.resharding import OwnedRange, Resharding, owned_ranges, pair
from dearmpi.plan.data.layout import BucketLayout, ParamSpec, build_layout
from tests.combinations import pairs_of, turns_of
from tests.fakes.ranks import run_ranks
from tests.mpi.oracle import OPTIMIZERS
from tests.unit.engine.stage import wait_for

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
        wrapped._controller.live.context.model(
            torch.linspace(-1, step, 10).reshape(2, 5)
        ).square().sum().backward()
        wrapped.step()


def flat(state_dict: dict[str, Any]) -> dict[str, Tensor]:
    return {
        f"{index} {key}": torch.as_tensor(value)
        for index, entries in state_dict["state"].items()
        for key, value in entries.items()
    }


@pairs_of(size=[2, 5], optimizer=["adam", "nadam", "sgd"], gather=["parameters", "gradients"])
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


@turns_of(
    settings=[{}, {"eager": True}, {"comm_dtype": "bf16"}, {"gather": "gradients"}],
    progress=["thread", "poll"],
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


@pytest.mark.parametrize("beside", [False, True])
def test_the_old_buffers_are_gone_once_nobody_needs_them(
    monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """They are as large as the model, and Python may take its time to look for cycles.

    beside: updates run on the background thread, as long ones do.
    """
    monkeypatch.setattr(stages, "LONG_S", 0.0 if beside else float("inf"))

    def rank(world: World) -> None:
        wrapped = trained(world, "adam")
        buckets = [update.bucket for update in wrapped._built.updates.of_buckets]
        old = [weakref.ref(getattr(bucket, n).data) for bucket in buckets for n in BUFFERS]
        del buckets
        wrapped.fuse(1.0)
        wrapped.synchronize()
        wait_for(lambda: all(reference() is None for reference in old), "their end")
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
            parts = owned_ranges(bucket, placed)
            assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
            assert parts[-1].stop == placed.spec.numel
            for part in parts:
                first, last = bucket.shard_range(part.rank)
                assert first <= placed.start + part.start < placed.start + part.stop <= last


@st.composite
def two_layouts(draw: st.DrawFn) -> tuple[int, list[BucketLayout]]:
    """A number of ranks, and the same parameters in buckets of two kinds."""
    size = draw(st.integers(1, 6))
    specs = [
        ParamSpec(f"p{index}", (numel,))
        for index, numel in enumerate(draw(st.lists(st.integers(1, 40), min_size=1, max_size=7)))
    ]
    cuts = st.sets(st.integers(1, len(specs)))
    layouts = []
    for _ in range(2):
        bounds = sorted({0, len(specs), *draw(cuts)})
        groups = [specs[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
        layouts.append(build_layout(groups, size))
    return size, layouts


def owned(layout: BucketLayout) -> dict[str, list[OwnedRange]]:
    return {
        placed.spec.name: owned_ranges(bucket, placed)
        for bucket in layout
        for placed in bucket.placements
    }


@given(two_layouts())
def test_a_rank_finds_its_own_among_all_pairs_and_in_their_order(
    drawn: tuple[int, list[BucketLayout]],
) -> None:
    size, (before, after) = drawn
    new = owned(after)
    for name, old in owned(before).items():
        for rank in range(size):
            expected = [
                (one, other)
                for one, other in product(old, new[name])
                if rank in (one.rank, other.rank)
                and set(range(one.start, one.stop)) & set(range(other.start, other.stop))
            ]
            assert list(pair(old, new[name], rank=rank)) == expected


class Watched(OwnedRange):
    """Counts how often it is looked at."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        Watched.looks += 1
        return super().__getattribute__(name)


def test_what_a_rank_looks_at_grows_with_the_number_of_ranks_and_no_faster() -> None:
    size = 1000
    parts = [Watched(rank, 4 * rank, 4 * rank + 4) for rank in range(size)]
    Watched.looks = 0
    assert len(list(pair(parts, parts, rank=7))) == 1
    assert Watched.looks < 20 * size


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_nothing_of_a_move_stays_once_the_state_is_in_its_place(
    gather: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ranks have described to each other grows with their number."""
    begun: list[weakref.ref[Resharding]] = []
    take = Resharding.take

    def observed(self: Resharding, collectives: Collectives) -> Iterator[Request]:
        begun.append(weakref.ref(self))
        yield from take(self, collectives)

    monkeypatch.setattr(Resharding, "take", observed)

    def rank(world: World) -> None:
        wrapped = trained(world, "adam", gather=gather)
        wrapped.fuse(1.0)
        take_steps(wrapped, 1)
        wrapped.close()

    gc.disable()
    try:
        run_ranks(2, rank)
    finally:
        gc.enable()
    assert begun and all(reference() is None for reference in begun)
