"""``int8`` and ``int4`` between shards of any lengths: owners of whole tensors, and weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import Compress
from dearmpi.engine.bucket import bucket
from tests.combinations import turns_of
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill
from tests.mpi.oracle import copies, whole_tensor_optimizer

FORMATS = ["int8", "int4"]
DIM = 24  # all parameters differ in shape
PLANE = torch.linspace(-1.0, 1.0, DIM)


@pytest.fixture(autouse=True)
def _small_buckets_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bucket, "_LEAST_COMPRESSED", 100)
    yield


def make_model() -> nn.Module:
    model = nn.Sequential(
        *(nn.Linear(DIM, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 1))
    )
    fill(model)
    return model


def wrap(model: nn.Module, world: World, inner: str = "whole", **settings: Any) -> Any:
    optimizer: torch.optim.Optimizer
    if inner == "whole":
        optimizer = whole_tensor_optimizer(model, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"bucket_cap_mb": 0.006, "check_every": 5, **settings}
    return DistributedOptimizer(optimizer, model, world=world, **settings)


def train(model: nn.Module, optimizer: Any, steps: range, world: World) -> list[float]:
    """Learn a plane, of 60 samples a step in all, of which each rank has its part; the losses."""
    losses = []
    for step in steps:
        data = torch.randn(60, DIM, generator=torch.Generator().manual_seed(step))
        data = data.chunk(world.size)[world.rank]
        optimizer.zero_grad()
        loss = (model(data)[:, 0] - data @ PLANE / 4).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.synchronize()
    return losses


@turns_of(
    compress=FORMATS,
    schedule=["dear", "wfbp", "serial"],
    size=[2, 3, 5],
    cap_mb=[1e-4, 0.006, 1.0],
    shards=["auto", "weights"],
)
def test_replicas_are_equal_after_50_steps_and_learn_what_dense_ones_learn(
    compress: Compress, schedule: str, size: int, cap_mb: float, shards: str
) -> None:
    """Also where a rank owns nothing of a bucket, or at all."""

    def rank(world: World) -> tuple[dict[str, Tensor], list[float]]:
        losses = []
        for how in ("none", compress):
            model = make_model()
            settings: dict[str, Any] = {"schedule": schedule, "bucket_cap_mb": cap_mb}
            if shards == "weights":
                weights = [float(number % 3) for number in range(world.size)]
                settings |= {"inner": "adamw", "shards": weights}
            optimizer = wrap(model, world, compress=how, **settings)
            assert not any(one.cuts.is_even for one in optimizer.layout)
            losses.append(sum(train(model, optimizer, range(50), world)[-5:]))
            optimizer.close()
        return copies(model), losses

    found = run_ranks(size, rank)
    for other, _ in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0][0].items())
    dense, compressed = (sum(losses) for losses in zip(*(each for _, each in found), strict=True))
    assert compressed == pytest.approx(dense, rel=0.02 if compress == "int8" else 0.25)


@pytest.mark.parametrize("inner", ["whole", "adamw"])
@pytest.mark.parametrize("compress", FORMATS)
def test_what_travels_is_what_the_codecs_say(compress: Compress, inner: str) -> None:
    """Of uneven shards the mean over the ranks: all messages but a rank's own."""
    sizes: list[int] = []

    def seconds(label: str, sent: int) -> float:
        if label[:2] in ("EX", "AG", "RS"):
            sizes.append(sent)
        return 0.0

    def rank(world: World) -> Any:
        model = make_model()
        weights = "auto" if inner == "whole" else [3.0, 1.0, 0.0, 2.0]
        settings: dict[str, Any] = {"inner": inner, "shards": weights, "compress": compress}
        optimizer = wrap(model, world, bucket_cap_mb=1.0, check_every=0, **settings)
        train(model, optimizer, range(3), world)
        traffic = optimizer.traffic
        optimizer.close()
        return traffic

    traffic = run_ranks(4, rank, hub=FakeHub(4, seconds=seconds))[0]
    (nbytes,) = set(sizes)
    assert traffic.reduced == traffic.gathered == nbytes - nbytes // 4
    assert traffic.dense > (2 if compress == "int8" else 4) * (traffic.reduced + traffic.gathered)


def saved_after(steps: range, start: Any = None, **settings: Any) -> Any:
    """What each rank does: go on from ``start``, and return model and state."""

    def rank(world: World) -> Any:
        model = make_model()
        optimizer = wrap(model, world, **settings)
        if start is not None:
            model.load_state_dict(start[0])
            optimizer.load_state_dict(start[1])
        train(model, optimizer, steps, world)
        found = copies(model), copy.deepcopy(optimizer.state_dict())
        optimizer.close()
        return found

    return rank


def entries_of(saved: Any, key: str) -> list[Tensor]:
    return [entries[key] for _, entries in sorted(saved[1]["state"].items())]


@pytest.mark.parametrize("compress", FORMATS)
@pytest.mark.parametrize("cap_mb", [0.006, 1.0])
def test_a_resumed_run_goes_on_bit_by_bit(compress: Compress, cap_mb: float) -> None:
    settings: dict[str, Any] = {"compress": compress, "bucket_cap_mb": cap_mb}
    whole = run_ranks(3, saved_after(range(7), **settings))[1]
    start = run_ranks(3, saved_after(range(4), **settings))[0]
    for parts in run_ranks(3, saved_after(range(4, 7), start, **settings)):
        assert all(map(torch.equal, parts[0].values(), whole[0].values()))
        for key in ("master", "shown"):
            assert all(map(torch.equal, entries_of(parts, key), entries_of(whole, key)))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("compress", ["int4", "none"])
def test_no_digit_is_lost_on_another_number_of_ranks(size: int, compress: Compress) -> None:
    """Masters go to new owners, or, where nothing is compressed, into the parameters."""
    start = run_ranks(3, saved_after(range(6), compress="int8"))[0]
    masters = entries_of(start, "master")
    assert not all(map(torch.equal, entries_of(start, "shown"), masters))
    for found in run_ranks(size, saved_after(range(0), start, compress=compress)):
        if size > 1 and compress != "none":
            assert all(map(torch.equal, entries_of(found, "master"), masters))
            assert all(map(torch.equal, found[0].values(), start[0].values()))
        else:
            assert not any({"master", "shown"} & set(one) for one in found[1]["state"].values())
            by_shape = {value.shape: value for value in masters}
            assert all(torch.equal(by_shape[value.shape], value) for value in found[0].values())


def test_masters_follow_their_tensors_to_other_owners() -> None:
    """With other buckets, some of which are too small to be compressed."""

    def rank(world: World) -> Any:
        model = make_model()
        optimizer = wrap(model, world, compress="int8", check_every=1)
        kept = []
        for number, cap_mb in enumerate((1.0, 0.006, 1e-4, 1.0)):
            before = copy.deepcopy(optimizer.state_dict()["state"])
            optimizer.fuse(cap_mb)
            after = copy.deepcopy(optimizer.state_dict()["state"])
            for index, entries in before.items():
                for key in {"master", "shown"} & set(after[index]) & set(entries):
                    assert torch.equal(entries[key], after[index][key])
            train(model, optimizer, range(3 * number, 3 * number + 3), world)
            state = optimizer.state_dict()["state"]
            assert all(("master" in one) == ("shown" in one) for one in state.values())
            kept.append(sum("master" in one for one in state.values()))
        optimizer.close()
        return kept, copies(model)

    first, *others = run_ranks(3, rank)
    assert first[0][0] == first[0][-1] == 6 and 0 < first[0][2] < 6
    for kept, found in others:
        assert kept == first[0]
        assert all(torch.equal(found[name], value) for name, value in first[1].items())
