"""Sparse gradients by magnitude: which elements and blocks are chosen, and what they sum to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import Compress, Feedback
from dearmpi.engine.bucket import bucket
from dearmpi.engine.codec.largest import largest
from tests.combinations import turns_of
from tests.fakes.ranks import run_ranks

TOP: list[Compress] = ["topk", "block-topk"]


@pytest.fixture(autouse=True)
def _small_buckets_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bucket, "_LEAST_COMPRESSED", 1)
    yield


@pytest.mark.parametrize("numel", [1, 7, 1000, 200_000])
@pytest.mark.parametrize("kind", ["normal", "few values", "few", "zero", "equal"])
def test_the_largest_are_chosen_whatever_the_threshold(numel: int, kind: str) -> None:
    """As by sorting, where of equal ones the first count."""
    row = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    if kind == "few values":
        row = (2 * row).round()
    if kind == "few":
        row[torch.arange(numel) % 97 > 0] = 0.0
    if kind == "zero":
        row.zero_()
    if kind == "equal":
        row.fill_(-3.0)
    order = row.abs().sort(descending=True, stable=True)
    for num in sorted({1, max(1, numel // 100), max(1, numel // 3), numel}):
        expected = order.indices[:num].sort().values
        least = float(order.values[num - 1])
        for threshold in (0.0, 0.85 * least, least, 1.2 * least, 9.9):
            assert torch.equal(largest(row, num, threshold)[0], expected)


def gradient_of(rank: int) -> Tensor:
    """Whole numbers, and a few large ones: at the same places on all ranks, or cancelling there."""
    gradient = torch.randint(-4, 5, (20, 310), generator=torch.Generator().manual_seed(rank))
    gradient[3, 50:60] += 100
    gradient[15, 50:60] += 100 if rank % 2 else -100
    return gradient.float()


def move_once(world: World, compress: Compress, feedback: Feedback, density: float) -> Any:
    """What one step of SGD does, and what is owed after it."""
    model = nn.Linear(310, 20, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model,
        world=world,
        compress=compress,
        density=density,
        error_feedback=feedback,
    )
    (model.weight * gradient_of(world.rank)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    traffic = optimizer.traffic
    entries = optimizer.state_dict()["state"][0]
    found = -entries["master"], entries.get("owed"), traffic
    optimizer.close()
    return found


@turns_of(size=[2, 3], feedback=["ef14", "none"], density=[1.0, 0.05])
def test_each_rank_sends_its_own_largest_elements(
    size: int, feedback: Feedback, density: float
) -> None:
    moved, owed, traffic = run_ranks(size, lambda w: move_once(w, "topk", feedback, density))[0]
    shard = -(-6200 // size)
    num, expected = math.ceil(density * shard), torch.zeros(size * shard)
    for rank in range(size):
        padded = torch.zeros(size * shard)
        padded[:6200] = gradient_of(rank).reshape(-1)
        for first in range(0, size * shard, shard):
            part = padded[first : first + shard]
            chosen = part.abs().sort(descending=True, stable=True).indices[:num] + first
            expected[chosen] += padded[chosen]
    whole = torch.stack([gradient_of(rank) for rank in range(size)]).sum(0)
    assert torch.allclose(moved.reshape(-1), expected[:6200] / size)
    if feedback == "ef14":
        assert torch.allclose(moved + owed, whole / size)
        assert traffic.owed_share == pytest.approx(owed_by_first(num, shard))
    else:
        assert owed is None and traffic.owed_share is None


def owed_by_first(num: int, shard: int) -> float:
    """The share of its gradient's squared norm that rank 0 has not sent."""
    padded = torch.zeros(-(-6200 // shard) * shard)
    padded[:6200] = gradient_of(0).reshape(-1).square()
    sent = sum(float(part.topk(num).values.sum()) for part in padded.split(shard))
    return 1 - sent / float(padded.sum())


@pytest.mark.parametrize("size", [2, 4])
def test_blocks_are_chosen_by_what_they_sum_to(size: int) -> None:
    """Those that cancel between ranks are large on each, and not sent."""
    moved, owed, traffic = run_ranks(size, lambda w: move_once(w, "block-topk", "ef14", 0.05))[0]
    whole = torch.stack([gradient_of(rank) for rank in range(size)]).sum(0)
    assert torch.equal(moved + owed, whole / size)
    assert torch.equal(moved[3, 50:60], whole[3, 50:60] / size)
    assert not moved[15, 50:60].any()
    assert traffic.reduced < 0.8 * traffic.dense / 2
