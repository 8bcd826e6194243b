"""Blocks that are not zero: the same bits as without compression, and few bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.algorithms.scratch import Scratch
from dearmpi.comm.api.collectives import Request
from dearmpi.comm.world import World
from dearmpi.config import Gather, ReduceScatter
from dearmpi.engine.bucket import bucket
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.bucket.buffers import Arena
from dearmpi.engine.codec import nonzero
from dearmpi.engine.codec.nonzero import NonzeroReduce
from dearmpi.plan.data.layout import build_layout, spec_of
from tests.combinations import turns_of
from tests.fakes import FakeHub
from tests.fakes.collectives import FakeCollectives
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill
from tests.mpi.oracle import copies
from tests.unit.engine.parts import distribute, resume

ROWS, WIDTH = 300, 7  # shards of 1,050 elements at two ranks: the last block is shorter


@pytest.fixture(autouse=True)
def _small_buckets_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bucket, "_LEAST_COMPRESSED", 1)
    yield


class Table(nn.Module):
    """An embedding and a layer on top."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        fill(self)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(rows)).square().mean()
        return out


def bucket_of(values: Tensor, rank: int) -> BucketRuntime:
    param = nn.Parameter(values)
    layout = build_layout([[spec_of(param, "p")]], 2)
    arenas = Arena(layout), Arena(layout, zeroed=False)
    return BucketRuntime(
        layout.buckets[0], [param], rank=rank, gradients=arenas[0], parameters=arenas[1]
    )


def train(world: World, *, rows: list[list[int]], **settings: Any) -> dict[str, Tensor]:
    """Steps on ``rows``, of which each rank takes others; parameters and state afterwards."""
    model = Table()
    optimizer = distribute(model, world, bucket_cap_mb=1.0, check_every=1, **settings)
    for step, chosen in enumerate(rows):
        shifted = [(row + 11 * world.rank * (step + 1)) % ROWS for row in chosen]
        optimizer.zero_grad()
        model(torch.tensor(shifted)).backward()
        optimizer.step()
    state = optimizer.state_dict()["state"]
    optimizer.close()
    entries = {f"{n} {k}": v for n, each in state.items() for k, v in each.items()}
    return copies(model) | {k: v for k, v in entries.items() if isinstance(v, Tensor)}


def bits(found: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: value.contiguous().numpy().tobytes() for name, value in found.items()}


@turns_of(
    gather=["parameters", "gradients"],
    reduce_scatter=["ring", "exchange"],
    size=[2, 3, 4],
    inner=["plain", "sgd", "adam"],
    rows=[[[3, 5]] * 4, [[0], [299], [0, 299]], [list(range(300))] * 3 + [[7]] * 3],
)
def test_every_bit_is_as_without_compression(
    gather: Gather,
    reduce_scatter: ReduceScatter,
    size: int,
    inner: str,
    rows: list[list[int]],
) -> None:
    settings: dict[str, Any] = {
        "gather": gather,
        "reduce_scatter": reduce_scatter,
        "inner": inner,
        "rows": rows,
    }
    dense = run_ranks(size, lambda world: train(world, **settings))
    sparse = run_ranks(size, lambda world: train(world, compress="nonzero", **settings))
    for one, other in zip(dense, sparse, strict=True):
        assert bits(one) == bits(other)


@turns_of(inner=["plain", "adam", "sgd"], gather=["parameters", "gradients"])
def test_after_50_steps_parameters_and_state_have_every_bit(inner: str, gather: Gather) -> None:
    """Ranks use other rows in each step: none, few or all of them."""
    every = list(range(ROWS))
    rows = [every[step % 40 :: 1 + 37 * (step % 3)] for step in range(50)]
    settings: dict[str, Any] = {"gather": gather, "inner": inner, "rows": rows}
    dense, sparse = (
        run_ranks(3, lambda w: train(w, compress=how, reduce_scatter="ring", **settings))  # noqa: B023
        for how in ("none", "nonzero")
    )
    assert [bits(one) for one in dense] == [bits(one) for one in sparse]


@pytest.mark.parametrize("size", [2, 5])
def test_flags_of_many_ranks_are_joined_and_not_added(size: int) -> None:
    """Neighbouring blocks, of which every rank has the first and one its own as well."""
    hub = FakeHub(size, name=lambda buffer: f" {buffer.numel()} ")

    def rank(world: World) -> Tensor:
        model = nn.Linear(64 * 20 * size, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = distribute(model, world, inner="plain", compress="nonzero", bucket_cap_mb=1.0)
        factors = torch.zeros(1, 64 * 20 * size)
        factors[:, :64] = 1.0
        factors[:, 64 * (1 + world.rank) : 64 * (2 + world.rank)] = 1.0
        (model.weight * factors).sum().backward()
        averaged: Tensor = optimizer.gradients()["weight"].view(-1, 64)[:, 0]
        optimizer.step()
        optimizer.close()
        return averaged * size

    for counts in run_ranks(size, rank, hub=hub):
        assert counts.tolist() == pytest.approx([size] + [1] * size + [0] * (19 * size - 1))
    shown = hub.picture(0).split()
    assert shown[shown.index("RS") + 1] == str(64 * size * (1 + size)), "all in the first shard"


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 0.0, 1e-45])
def test_numbers_that_are_not_ordinary_arrive_as_they_are(value: float, gather: Gather) -> None:
    def rank(world: World) -> list[dict[str, bytes]]:
        found = []
        for compress in ("none", "nonzero"):
            model = nn.Linear(500, 1, bias=False)
            nn.init.zeros_(model.weight)
            settings: dict[str, Any] = {"gather": gather, "compress": compress}
            optimizer = distribute(model, world, inner="plain", reduce_scatter="ring", **settings)
            factors = torch.zeros(1, 500)
            factors[0, 130:140] = value if world.rank == 1 else -0.0
            (model.weight * factors).sum().backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.close()
            found.append(bits(copies(model)))
        return found

    for dense, sparse in run_ranks(3, rank):
        assert dense == sparse


def test_what_was_set_back_is_gathered_again() -> None:
    """A step that comes to the numbers of the step before last has changed them all the same."""

    def rank(world: World) -> dict[str, bytes]:
        model = nn.Linear(500, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = distribute(model, world, inner="plain", compress="nonzero")
        for _ in range(2):
            with torch.no_grad():
                model.weight.zero_()
            optimizer.zero_grad()
            (model.weight * torch.ones(1, 500)).sum().backward()
            optimizer.step()
        optimizer.synchronize()
        assert bool((model.weight < 0).all())
        optimizer.close()
        return bits(copies(model))

    first, *others = run_ranks(3, rank)
    assert all(other == first for other in others)


def test_little_travels_where_few_rows_are_used() -> None:
    sizes: list[tuple[str, int]] = []

    def seconds(label: str, sent: int) -> float:
        sizes.append((label[:2], sent))
        return 0.0

    def rank(world: World) -> Any:
        model = Table()
        optimizer = distribute(model, world, inner="plain", compress="nonzero", bucket_cap_mb=1.0)
        for _ in range(3):
            model(torch.tensor([3, 5])).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        traffic = optimizer.traffic
        optimizer.close()
        return traffic

    traffic = run_ranks(2, rank, hub=FakeHub(2, seconds=seconds))[0]
    per_step = 2 * nonzero.BLOCK * 4  # the first block, and the last, of floats
    assert sizes.count(("RS", per_step)) == sizes.count(("AG", per_step)) == 3
    assert traffic.reduced < traffic.dense / 6 and traffic.gathered < traffic.dense / 6


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_a_dense_bucket_is_looked_at_rarely(
    gather: Gather, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks: list[int] = []
    monkeypatch.setattr(nonzero, "_RARELY", 4)
    mark = nonzero.mark

    def count(shard: Tensor, shown: Tensor | None, flags: Tensor) -> None:
        marks.append(1)
        mark(shard, shown, flags)

    monkeypatch.setattr(nonzero, "mark", count)
    every = list(range(ROWS))
    run_ranks(2, lambda w: train(w, rows=[every] * 12, gather=gather, compress="nonzero"))
    looks_at = {1, 3, 7, 11}
    assert len(marks) == len(looks_at) * 2 * (2 + 1), "2 ranks mark 2 shards, and then their own"


def test_the_second_operations_of_buckets_keep_the_order_of_the_first() -> None:
    """Whichever bucket a rank looks at first when the flags of both have come."""
    hub = FakeHub(2, check_buffers=False)
    requests: list[list[Request]] = []
    buffers: list[list[BucketRuntime]] = []
    for rank in range(2):
        collectives = FakeCollectives(hub, rank, 1)
        buckets = [bucket_of(torch.full((500,), 1.0 + number), rank) for number in range(2)]
        codecs = [NonzeroReduce(b, CollectiveAlgorithms("ring"), Scratch()) for b in buckets]
        for each, value in zip(buckets, (1.0, 2.0), strict=True):
            each.gradients.data[: 64 * int(value)].fill_(value)
        buffers.append(buckets)
        requests.append(
            [codec.start(b, collectives, 0) for codec, b in zip(codecs, buckets, strict=True)]
        )
    for _ in range(8):
        for rank, order in ((0, (0, 1)), (1, (1, 0))):
            for number in order:
                requests[rank][number].test()
    assert all(request.test() for each in requests for request in each)
    first, second = (each.gradients.shard for each in buffers[0])
    assert first.count_nonzero() == 64 and bool((first[:64] == 2.0).all())
    assert second.count_nonzero() == 128 and bool((second[:128] == 4.0).all())


@pytest.mark.parametrize("inner", ["adam", "plain"])
def test_a_run_goes_on_without_compression_and_back(inner: str) -> None:
    whole = run_ranks(3, resume(range(6), inner=inner, reduce_scatter="ring"))
    start = run_ranks(3, resume(range(3), inner=inner, compress="nonzero"))[0][0]
    assert not any("master" in entries for entries in start[1]["state"].values())
    settings: dict[str, Any] = {"inner": inner, "reduce_scatter": "ring"}
    for compress in ("none", "nonzero"):
        parts = run_ranks(3, resume(range(3, 6), start, compress=compress, **settings))
        assert {digest for _, digest in parts} == {digest for _, digest in whole}
