"""Coordinates of sparse gradients: shared or own, of each shard or of each parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer, EngineConfig
from dearmpi.comm.world import World
from dearmpi.config import Compress, Coordinates
from dearmpi.engine.bucket import bucket
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.bucket.buffers import Arena
from dearmpi.engine.codec.largest import ModelShares, count_magnitudes
from dearmpi.engine.codec.selected import selector_of
from dearmpi.engine.codec.sparse import Segment, segments_of
from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import build_layout, spec_of
from tests.codes import raises
from tests.combinations import turns_of
from tests.fakes.ranks import run_ranks
from tests.mpi.oracle import copies
from tests.unit.engine.codec.test_estimates import held
from tests.unit.engine.codec.test_sparse import mean_of, owed_and_done, train_on_whole_numbers
from tests.unit.engine.test_compress import make_wide_model, regress

WAYS: list[dict[str, Any]] = [
    {"compress": "topk", "coordinates": "shared"},
    {"compress": "random-k", "coordinates": "own", "scope": "parameter"},
    {"compress": "block-topk", "coordinates": "own"},
    {"compress": "random-block", "coordinates": "own"},
    {"compress": "topk", "scope": "parameter"},
    {"compress": "random-block", "scope": "parameter"},
    {"compress": "random-k", "scope": "parameter"},
    {"compress": "topk", "coordinates": "shared", "scope": "parameter"},
    {"compress": "random-block", "coordinates": "own", "scope": "parameter"},
    {"compress": "random-k", "coordinates": "own"},
    {"compress": "block-topk", "scope": "parameter"},
    {"compress": "topk", "scope": "model"},
    {"compress": "block-topk", "coordinates": "own", "scope": "parameter"},
]


@pytest.fixture(autouse=True)
def _small_buckets_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bucket, "_LEAST_COMPRESSED", 1)
    yield


@turns_of(way=WAYS, density=[0.1, 1.0, 0.3], size=[2, 4])
def test_no_part_of_a_gradient_is_lost(way: dict[str, Any], density: float, size: int) -> None:
    """Whole numbers over a power of two are exact, so that the sum is."""

    def rank(world: World) -> Any:
        return train_on_whole_numbers(world, range(9), density=density, **way)

    for model, state in run_ranks(size, rank):
        assert torch.equal(owed_and_done(state), -mean_of(range(9), size))
        assert len(model) == 1


@turns_of(way=WAYS)
def test_replicas_are_equal_learn_and_send_what_is_said(way: dict[str, Any]) -> None:
    """By estimates of gradients, of which owners have the sum. Blocks of each parameter are whole,
    so that at most twice as much is sent, beside what chooses them.
    """
    are_rounded = (way["compress"], way.get("scope")) == ("block-topk", "parameter")

    def rank(world: World) -> tuple[dict[str, Tensor], Tensor, Tensor, float, list[float]]:
        model = make_wide_model()
        optimizer = DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.005),
            model,
            world=world,
            density=0.3,
            error_feedback="ef21",
            **way,
        )
        losses = regress(model, optimizer, world, steps=40)
        estimate, total = held(optimizer)
        traffic = optimizer.traffic
        optimizer.close()
        return copies(model), estimate, total, traffic.reduced / traffic.dense * 2, losses

    found = run_ranks(2, rank)
    summed = torch.stack([estimate for _, estimate, *_ in found]).sum(0).view(2, -1)
    for number, (model, _, total, sent, losses) in enumerate(found):
        assert all(torch.equal(value, found[0][0][name]) for name, value in model.items())
        torch.testing.assert_close(total, summed[number][: len(total)], rtol=1e-4, atol=1e-5)
        assert 0.3 <= sent < (0.8 if are_rounded else 0.7) and sum(losses[-5:]) < 0.7 * sum(
            losses[:5]
        )


@pytest.mark.parametrize("kind", ["random-block", "random-k", "topk"])
def test_each_parameter_has_its_share(kind: Compress) -> None:
    params = [nn.Parameter(torch.zeros(num)) for num in (16, 96, 32, 57)]
    specs = [spec_of(param, str(slot)) for slot, param in enumerate(params)]
    layout = build_layout([specs], 2)
    runtime = BucketRuntime(
        layout.buckets[0], params, rank=0, gradients=Arena(layout), parameters=Arena(layout)
    )
    shards = segments_of(runtime, density=0.1, scope="parameter")
    assert shards == [
        [Segment(0, 16, 2), Segment(16, 101, 9)],
        [Segment(0, 11, 2), Segment(11, 43, 4), Segment(43, 100, 6)],
    ]
    selector = selector_of(kind, 0, shards, scales=True)
    rows = torch.randn(2, 101, generator=torch.Generator().manual_seed(0))
    for shard, row in enumerate(rows):
        seen: set[int] = set()
        for turn in range(12):
            chosen = selector.choose(row, shard, rank=0, turn=turn)
            assert len(chosen) == 12 and bool((chosen.diff() >= 0).all())
            places = set(chosen.tolist())
            seen |= places
            for one in shards[shard]:
                num = len(places & set(range(one.start, one.stop)))
                assert 0 < num <= one.num and (num == one.num or kind == "random-block")
        assert kind != "random-block" or seen == set(range(shards[shard][-1].stop))


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"scope": "bucket"}, "setting-without-effect"),
        ({"compress": "int8", "coordinates": "own"}, "setting-without-effect"),
        ({"compress": "topk", "scope": "all"}, "unknown-choice"),
        ({"compress": "topk", "scope": "model", "coordinates": "shared"}, "settings-contradict"),
        ({"compress": "block-topk", "scope": "model"}, "settings-contradict"),
    ],
)
def test_what_means_nothing_is_refused(settings: dict[str, Any], code: str) -> None:
    with raises(ConfigError, code):
        EngineConfig(**settings)


@pytest.mark.parametrize("coordinates", ["shared", "own"])
def test_each_parameter_sends_its_heaviest_blocks(coordinates: Coordinates) -> None:
    """One far above the others would have all blocks of a bucket; a short one has its own."""
    numels, heavy = (3000, 40, 900, 8060), 2000

    def rank(world: World) -> Tensor:
        model = nn.ParameterList(nn.Parameter(torch.zeros(num)) for num in numels)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9),
            model,
            world=world,
            compress="block-topk",
            scope="parameter",
            coordinates=coordinates,
            density=0.1,
        )
        loss = torch.zeros(())
        for slot, param in enumerate(model):
            scale = torch.full_like(param, 1e-3 * (1 + slot))
            scale[len(param) // 2] = heavy
            loss = loss + (scale * param).sum()
        loss.backward()
        optimizer.step()
        state = optimizer.state_dict()["state"]
        optimizer.close()
        return torch.cat([state[slot]["momentum_buffer"] for slot in range(len(numels))])

    for averaged in run_ranks(2, rank):
        parts = averaged.split(numels)
        assert all(part[len(part) // 2] == heavy for part in parts)
        assert averaged.count_nonzero() < 2 * 0.1 * sum(numels)


def test_buckets_send_the_largest_of_the_whole_model() -> None:
    """Counts travel with a step, and share out the next one: all of it, whatever a bucket has."""

    def rank(world: World) -> tuple[list[list[int]], list[float]]:
        model = nn.ParameterList(nn.Parameter(torch.zeros(8192)) for _ in range(4))
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5),
            model,
            world=world,
            compress="topk",
            scope="model",
            density=0.1,
            bucket_cap_mb=8192 * 4 / 2**20,
            error_feedback="none",
        )
        codecs: Any = optimizer._built.engine.codecs.reduce
        assert len(codecs) == 4
        found, ratios = [], []
        for step in range(3):
            generator = torch.Generator().manual_seed(world.rank + 2 * step)
            scales = [torch.randn(8192, generator=generator) for _ in model]
            scales[1] *= 100.0
            sum(
                (scale * param).sum() for scale, param in zip(scales, model, strict=True)
            ).backward()
            optimizer.step()
            optimizer.synchronize()
            found.append([codec.num_sent for codec in codecs])
            traffic = optimizer.traffic
            ratios.append(traffic.reduced / traffic.dense * 2)
        optimizer.close()
        return found, ratios

    found, ratios = zip(*run_ranks(2, rank), strict=True)
    assert found[0] == found[1] and ratios[0] == ratios[1]
    usual, first, then = found[0]
    assert usual == [410] * 4
    for shares in (first, then):
        assert sum(shares) <= sum(usual)
        assert sum(shares[place] for place in (0, 2, 3)) < 80 < 1500 < max(shares)
    assert all(ratio < 0.3 for ratio in ratios[0])


def test_counts_of_magnitudes_end_where_numbers_do() -> None:
    values = torch.tensor([0.0, 1e-45, 1e-30, 0.75, -0.75, 1.0, 3e38])
    counts = count_magnitudes(values, finite=True)
    assert counts.sum() == 7 and counts[0] == 3 and counts[-1] == 1
    assert sorted(counts[counts > 0].tolist()) == [1, 1, 2, 3]
    assert not count_magnitudes(values, finite=False).any()


def test_a_model_without_gradients_keeps_its_shares() -> None:
    shares = ModelShares()
    shares.add(0, usual=5, most=9)
    shares.add(1, usual=5, most=9)
    shares.note(0, torch.zeros(64))
    assert [shares.of(index, 1) for index in (0, 1)] == [5, 5]  # the other has not been counted
    shares.note(1, torch.zeros(64))
    assert [shares.of(index, 2) for index in (0, 1)] == [5, 5]
    counted = torch.zeros(64)
    counted[40] = 90.0
    shares.note(0, counted)
    assert [shares.of(index, 2) for index in (0, 1)] == [5, 5]  # in the same step
    assert [shares.of(index, 3) for index in (0, 1)] == [9, 1]
    shares.reset()
    assert [shares.of(index, 4) for index in (0, 1)] == [5, 5]
