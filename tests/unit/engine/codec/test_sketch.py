"""Sketches: decoded exactly or not at all, and nothing lost where they cannot be."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dearmpi import DistributedOptimizer, EngineConfig
from dearmpi.comm.algorithms.registry import CollectiveAlgorithms
from dearmpi.comm.algorithms.scratch import Scratch
from dearmpi.comm.api.collectives import Completed, Request
from dearmpi.comm.world import World
from dearmpi.engine.bucket import bucket
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.bucket.buffers import Arena
from dearmpi.engine.codec import sketch
from dearmpi.engine.codec.nonzero import BLOCK
from dearmpi.engine.codec.sketch import NUM_TABLES, Outlook, SketchReduce, peel, places_of
from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import build_layout, spec_of
from tests.codes import raises
from tests.fakes.ranks import run_ranks

ROWS = 300  # blocks of a parameter


@pytest.fixture(autouse=True)
def _small_buckets_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bucket, "_LEAST_COMPRESSED", 1)
    yield


def sketch_of(blocks: Tensor, values: Tensor, width: int, seed: int) -> Tensor:
    cells = torch.zeros(NUM_TABLES * width, BLOCK, dtype=torch.int32)
    for place in places_of(blocks, width, seed=seed):
        cells.index_add_(0, place, values)
    return cells


def test_the_sum_of_sketches_is_that_of_what_they_stand_for() -> None:
    """To the bit, and also where cells overflow; what is not decoded is known, and rare."""
    failed = 0
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros(400, BLOCK, dtype=torch.int32)
        width = Outlook(exponent=0, num_blocks=60, turn=0).width
        cells = torch.zeros(NUM_TABLES * width, BLOCK, dtype=torch.int32)
        for _ in range(2):
            blocks = torch.randperm(400, generator=generator)[:30].sort().values
            values = torch.randint(-(2**30), 2**30, (30, BLOCK), generator=generator).int()
            total[blocks] += values
            cells += sketch_of(blocks, values, width, seed)
        blocks = total.any(1).nonzero().view(-1)
        found = peel(blocks, cells, seed=seed)
        failed += found is None
        assert found is None or torch.equal(found, total[blocks])
    assert failed <= 4  # two blocks have the same cells in 1 of 37 sketches of this size


@given(num=st.integers(0, 5000), size=st.integers(1, 4), seed=st.integers(0, 1 << 40))
def test_any_number_of_blocks_is_decoded_to_the_bit_or_not_at_all(
    num: int, size: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(6000, BLOCK, dtype=torch.int32)
    width = Outlook(exponent=0, num_blocks=num, turn=0).width
    cells = torch.zeros(NUM_TABLES * width, BLOCK, dtype=torch.int32)
    union = torch.randperm(6000, generator=generator)[:num]
    for rank in range(size):
        blocks = union[rank::size].sort().values
        values = torch.randint(-(2**31), 2**31 - 1, (len(blocks), BLOCK), generator=generator).int()
        total[blocks] += values
        cells += sketch_of(blocks, values, width, seed)
    blocks = union.sort().values
    found = peel(blocks, cells, seed=seed)
    assert found is None or torch.equal(found, total[blocks])
    assert found is not None or num > 0


def num_failed(monkeypatch: pytest.MonkeyPatch, cells_per_key: float) -> int:
    """Of 60 sketches of 200 blocks, without spare cells, those that cannot be decoded."""
    monkeypatch.setattr(sketch, "_CELLS_PER_KEY", cells_per_key)
    width = Outlook(exponent=0, num_blocks=200, turn=0).width
    values, failed = torch.ones(200, BLOCK, dtype=torch.int32), 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        blocks = torch.randperm(5000, generator=generator)[:200].sort().values
        found = peel(blocks, sketch_of(blocks, values, width, seed), seed=seed)
        assert found is None or torch.equal(found, values)
        failed += found is None
    return failed


def test_few_cells_fail_often_and_are_known_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.23 for each block is where endless ones could just be decoded."""
    usual = sketch._CELLS_PER_KEY
    monkeypatch.setattr(sketch, "_SPARE_CELLS", 0)
    monkeypatch.setattr(sketch, "_GROWTH", 1.0)
    assert num_failed(monkeypatch, 1.23) > 12
    assert num_failed(monkeypatch, usual) <= 6


def test_with_too_few_cells_training_goes_on_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("_CELLS_PER_KEY", 0.9), ("_SPARE_CELLS", 0), ("_GROWTH", 1.0)):
        monkeypatch.setattr(sketch, name, value)

    def rank(world: World) -> list[Any]:
        gradients = [gradient_of(step, world.rank, num=20) for step in range(6)]
        return [train(world, gradients, compress=how) for how in ("none", "sketch")]

    for dense, sparse in run_ranks(3, rank):
        assert torch.equal(dense[0], sparse[0]) and sparse[2] >= 3


class Alike:
    """Collectives of one rank whose others send what it sends; complete at once."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.posted = 1, size, list[Tensor]()

    def reserve(self) -> AbstractContextManager[None]:
        return nullcontext()

    def start_reduce_scatter(self, buffer: Tensor, *_: Any, **__: Any) -> Request:
        self.posted.append(buffer.clone())
        buffer.mul_(self.size)
        return Completed()

    def start_all_reduce(self, buffer: Tensor, op: str) -> Request:
        assert op == "max"
        return Completed()

    def start_all_gather(self, buffer: Tensor, *_: Any, **__: Any) -> Request:
        rows = buffer.view(self.size, -1)
        rows.copy_(rows[self.rank].clone().expand_as(rows))
        return Completed()


@pytest.mark.parametrize("size", [2, 255, 256])
def test_flags_of_many_ranks_add_up_without_a_carry(size: int) -> None:
    """The same blocks on every rank. Bytes hold 255; of more ranks a bucket has no sketch."""
    blocks_of_shard = 100
    param = nn.Parameter(torch.zeros(size * blocks_of_shard * BLOCK))
    layout = build_layout([[spec_of(param, "p")]], size)
    runtime = BucketRuntime(
        layout.buckets[0], [param], rank=1, gradients=Arena(layout), parameters=Arena(layout)
    )
    codec = SketchReduce(runtime, CollectiveAlgorithms("ring"), Scratch())
    collectives: Any = Alike(size)
    for step in range(2):
        data = runtime.gradients.data.zero_()
        shards = data.view(size, blocks_of_shard, BLOCK)
        shards[:, 30:34] = 3.0 + step
        shards[:, 33, 5] = -0.0
        expected = shards[1] * size
        collectives.posted.clear()
        request = codec.start(runtime, collectives, step)
        while not request.test():
            pass
        assert torch.equal(runtime.gradients.shard.view_as(expected), expected)
        codec.commit(runtime, is_final=True)
    assert any(one.dtype == torch.uint8 for one in collectives.posted) == (size <= 255)
    assert codec.fallbacks == 0


def test_two_blocks_with_the_same_cells_are_not_guessed() -> None:
    blocks = torch.arange(2)
    seed = next(
        seed
        for seed in range(10_000)
        if all(bool(place[0] == place[1]) for place in places_of(blocks, 4, seed=seed))
    )
    values = torch.ones(2, BLOCK, dtype=torch.int32)
    assert peel(blocks, sketch_of(blocks, values, 4, seed), seed=seed) is None
    stray = sketch_of(blocks[:1], values[:1], 4, seed)
    stray[0, 0] += 1  # of a block that no flag names
    assert peel(blocks[:1], stray, seed=seed) is None


def gradient_of(step: int, rank: int, num: int = 6) -> Tensor:
    """Whole numbers in a few rows."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    gradient = torch.zeros(ROWS, BLOCK)
    chosen = torch.randperm(ROWS, generator=generator)[:num]
    gradient[chosen] = torch.randint(-99, 99, (num, BLOCK), generator=generator).float()
    return gradient


def train(world: World, gradients: list[Tensor], **settings: Any) -> Any:
    """Parameters, what is sent, and how often it was sent whole."""
    model = nn.Linear(BLOCK, ROWS, bias=False)
    nn.init.zeros_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    given = {"compress": "sketch", "check_every": 1, "reduce_scatter": "ring", **settings}
    optimizer = DistributedOptimizer(inner, model, world=world, **given)
    for gradient in gradients:
        optimizer.zero_grad()
        (model.weight * gradient).sum().backward()
        optimizer.step()
    optimizer.synchronize()
    traffic = optimizer.traffic
    owed = optimizer.state_dict()["state"].get(0, {}).get("owed", torch.zeros(1))
    optimizer.close()
    return model.weight.detach().clone(), traffic, traffic.fallbacks, owed


@pytest.mark.parametrize("size", [2, 3])
def test_whole_numbers_are_as_without_compression(size: int) -> None:
    def rank(world: World) -> list[Any]:
        gradients = [gradient_of(step, world.rank) for step in range(8)]
        return [train(world, gradients, compress=how) for how in ("none", "sketch")]

    for dense, sparse in run_ranks(size, rank):
        assert torch.equal(dense[0], sparse[0])
        assert sparse[1].reduced < 0.4 * dense[1].reduced and sparse[2] == 0
        assert not bool(sparse[3].any())


def test_rounding_waits_and_nothing_is_lost() -> None:
    """Numbers far below the largest are rounded, and owed."""

    def rank(world: World) -> tuple[Tensor, Tensor]:
        gradients = []
        for step in range(6):
            gradient = gradient_of(step, world.rank)
            gradients.append(gradient * 2.0 ** -(25 * (torch.arange(ROWS)[:, None] % 2)))
        weight, _, fallbacks, owed = train(world, gradients)
        assert fallbacks == 0 and bool(owed.any())
        total = torch.stack(gradients).double().sum(0)
        return weight.double() - owed.double(), total

    found = run_ranks(2, rank)
    for done, _ in found:
        mean = sum(total for _, total in found) / 2
        torch.testing.assert_close(done, -mean, rtol=1e-6, atol=1e-12)


def test_a_run_resumed_on_other_ranks_loses_nothing() -> None:
    """Of what four ranks have rounded, two have the mean, and then four."""

    def going_on(size: int, steps: range, start: Any = None) -> Any:
        def rank(world: World) -> Any:
            model = nn.Linear(BLOCK, ROWS, bias=False)
            nn.init.zeros_(model.weight)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            optimizer = DistributedOptimizer(inner, model, world=world, compress="sketch")
            if start is not None:
                model.load_state_dict(start[0])
                optimizer.load_state_dict(copy.deepcopy(start[1]))
            for step in steps:
                optimizer.zero_grad()
                (model.weight * small(step, world.rank)).sum().backward()
                optimizer.step()
            found = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            optimizer.close()
            return found

        return run_ranks(size, rank)[0]

    def small(step: int, rank: int) -> Tensor:
        exponents = -25.0 * (torch.arange(ROWS)[:, None] % 2)
        return gradient_of(step, rank) * torch.exp2(exponents)

    saved, expected, first = None, torch.zeros(ROWS, BLOCK, dtype=torch.float64), 0
    owing: list[bool] = []
    for size in (4, 2, 4):
        steps = range(first, first + 4)
        saved, first = going_on(size, steps, saved), first + 4
        for step in steps:
            expected += sum(small(step, rank).double() for rank in range(size)) / size
        entries = saved[1]["state"].get(0, {})
        owed = entries.get("owed", torch.zeros(ROWS, BLOCK)).double()
        owing.append(bool(owed.any()))
        done = owed - saved[0]["weight"].double()
        torch.testing.assert_close(done, expected, rtol=1e-6, atol=1e-12)
    assert owing[0] and owing[1]


@pytest.mark.parametrize("why", ["no decoding", "more blocks", "larger numbers", "nan"])
def test_where_a_sketch_fails_the_bucket_travels_whole(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "no decoding":
        monkeypatch.setattr(sketch, "places_of", lambda blocks, width, **_: [blocks * 0] * 3)

    def rank(world: World) -> list[Any]:
        gradients = [gradient_of(step, world.rank) for step in range(4)]
        if why == "more blocks":
            gradients[2] = gradient_of(2, world.rank, num=60)
        if why == "larger numbers" and world.rank:
            gradients[2] = 1e6 * gradients[2]
        if why == "nan" and world.rank:
            gradients[2] = torch.where(gradients[2] == 0, 0.0, math.nan)
        return [train(world, gradients, compress=how) for how in ("none", "sketch")]

    for dense, sparse in run_ranks(2, rank):
        assert sparse[2] == (3 if why == "no decoding" else 1)
        if why == "nan":
            assert torch.equal(dense[0].isnan(), sparse[0].isnan())
        torch.testing.assert_close(dense[0], sparse[0], rtol=0, atol=0, equal_nan=True)


def test_a_resumed_run_goes_on_bit_by_bit_and_drops_leave_no_trace() -> None:
    def rank(world: World) -> list[Tensor]:
        ends, saved = [], None
        for way in ("whole", "resumed", "dropped"):
            model = nn.Linear(BLOCK, ROWS, bias=False)
            nn.init.zeros_(model.weight)
            inner = torch.optim.Adam(model.parameters(), lr=0.1)
            optimizer = DistributedOptimizer(inner, model, world=world, compress="sketch")
            if way == "resumed":
                assert saved is not None
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            for step in range(3 if way == "resumed" else 0, 6):
                for _ in range(2 if way == "dropped" else 0):
                    (model.weight * 1e5 * gradient_of(50 + step, world.rank)).sum().backward()
                optimizer.zero_grad()
                (model.weight * gradient_of(step, world.rank) / 3).sum().backward()
                optimizer.step()
                if step == 2:
                    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                    saved = saved or state
            optimizer.close()
            ends.append(model.weight.detach().clone())
        return ends

    for whole, resumed, dropped in run_ranks(2, rank):
        assert torch.equal(whole, resumed) and torch.equal(whole, dropped)


def test_a_dense_bucket_travels_as_it_is() -> None:
    def rank(world: World) -> list[Any]:
        gradients = [torch.full((ROWS, BLOCK), 1.0 + world.rank) for _ in range(4)]
        return [train(world, gradients, compress=how) for how in ("none", "sketch")]

    for dense, sparse in run_ranks(2, rank):
        assert torch.equal(dense[0], sparse[0]) and sparse[2] == 2 * 4  # both directions


@pytest.mark.parametrize("settings", [{"gather": "gradients"}, {"comm_dtype": "bf16"}])
def test_what_it_cannot_be_with_is_refused(settings: dict[str, Any]) -> None:
    with raises(ConfigError, "settings-contradict", "'sketch'"):
        EngineConfig(compress="sketch", **settings)
