"""Sharding of data: nothing twice, nothing lost, the same order at any world size."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dearmpi.errors import ConfigError, DataError, TaskError
from dearmpi.train.data.data import (
    Batches,
    MicroBatch,
    RankShares,
    cut,
    evaluation_shares,
    load_batch,
)
from dearmpi.train.tasks.task import Samples, Task
from tests.codes import raises


@dataclass(frozen=True)
class Shape:
    """Sizes of a run, as Batches's first arguments."""

    num_samples: int
    batch_size: int
    world_size: int
    micro_batches: int
    seed: int
    weights: tuple[float, ...] = ()

    def batches(self, rank: int) -> Batches:
        return Batches(
            self.num_samples,
            self.batch_size,
            self.world_size,
            rank,
            micro_batches=self.micro_batches,
            seed=self.seed,
            shares=RankShares(self.weights),
        )

    def step(self, epoch: int, step: int) -> list[tuple[MicroBatch, ...]]:
        return [self.batches(rank).step(epoch, step) for rank in range(self.world_size)]


@st.composite
def shapes(draw: st.DrawFn, *, weighted: bool = True) -> Shape:
    world_size = draw(st.integers(1, 6))
    micro_batches = draw(st.integers(1, 4))
    least = world_size * micro_batches
    weights: tuple[float, ...] = ()
    if weighted and draw(st.booleans()):
        weights = tuple(draw(st.floats(1.0, 3.0)) for _ in range(world_size))
        least *= 3
    return Shape(
        weights=weights,
        num_samples=draw(st.integers(world_size, 150)),
        batch_size=draw(st.integers(least, least + 40)),
        world_size=world_size,
        micro_batches=micro_batches,
        seed=draw(st.integers(0, 2**40)),
    )


def order_of_epoch(shape: Shape, epoch: int) -> list[int]:
    """Samples of an epoch, step by step, rank by rank."""
    return [
        index
        for step in range(shape.batches(0).steps_per_epoch)
        for of_rank in shape.step(epoch, step)
        for micro_batch in of_rank
        for index in micro_batch.indices
    ]


@given(shapes(), st.integers(0, 3))
def test_every_sample_is_used_exactly_once_per_epoch(shape: Shape, epoch: int) -> None:
    assert sorted(order_of_epoch(shape, epoch)) == list(range(shape.num_samples))


@given(shapes(), st.integers(0, 3))
def test_every_step_has_the_same_samples_at_any_world_size(shape: Shape, epoch: int) -> None:
    alone = Batches(shape.num_samples, shape.batch_size, 1, 0, seed=shape.seed)
    for step in range(alone.steps_per_epoch):
        shared = [i for of_rank in shape.step(epoch, step) for m in of_rank for i in m.indices]
        assert tuple(shared) == alone.step(epoch, step)[0].indices


@given(shapes())
def test_weights_average_over_ranks_to_the_mean_over_the_steps_samples(shape: Shape) -> None:
    losses = torch.rand(shape.num_samples, dtype=torch.float64)
    for step in range(shape.batches(0).steps_per_epoch):
        all_micro_batches = [m for of_rank in shape.step(0, step) for m in of_rank]
        used = [index for m in all_micro_batches for index in m.indices]
        weighted = sum(
            m.weight * losses[list(m.indices)].mean() for m in all_micro_batches if m.indices
        )
        assert all(m.weight == 0 for m in all_micro_batches if not m.indices)
        torch.testing.assert_close(weighted / shape.world_size, losses[used].mean())


@given(shapes(weighted=False))
def test_only_the_last_batch_of_an_epoch_is_partial_and_shares_are_even(shape: Shape) -> None:
    steps = shape.batches(0).steps_per_epoch
    for step in range(steps):
        micro_batches = [m for of_rank in shape.step(0, step) for m in of_rank]
        sizes = [len(m.indices) for m in micro_batches]
        per_rank = [sum(len(m.indices) for m in of_rank) for of_rank in shape.step(0, step)]
        assert max(per_rank) - min(per_rank) <= 1
        if step < steps - 1:
            assert sum(sizes) == shape.batch_size
            assert min(sizes) >= 1
    assert 0 < sum(sizes) <= shape.batch_size


def test_the_order_changes_with_the_epoch_and_with_the_seed() -> None:
    def first(seed: int, epoch: int) -> tuple[int, ...]:
        return Batches(1000, 100, 1, 0, seed=seed).step(epoch, 0)[0].indices

    assert len({first(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9


def test_the_order_is_that_of_every_version_before() -> None:
    """A checkpoint holds the position alone: in another order a run that goes on in the middle of
    an epoch would see some samples twice and others never.
    """
    (all_of_them,) = Batches(10, 10, 1, 0, seed=7).step(3, 0)
    assert all_of_them.indices == (3, 5, 4, 7, 8, 0, 9, 2, 1, 6)


def test_going_back_to_an_epoch_gives_its_order_again() -> None:
    batches = Batches(100, 10, 2, 1, seed=7)
    before = batches.step(0, 3)
    batches.step(1, 0)
    assert batches.step(0, 3) == before


def test_without_shuffling_the_order_is_the_data_sets_own() -> None:
    batches = Batches(10, 4, 2, 1, shuffle=False)
    assert [batches.step(5, step)[0].indices for step in range(3)] == [(2, 3), (6, 7), (9,)]


def test_a_last_batch_smaller_than_the_world_leaves_empty_micro_batches() -> None:
    every = [Batches(9, 4, 4, rank, shuffle=False) for rank in range(4)]
    last = [batches.step(0, 2)[0] for batches in every]
    assert [m.indices for m in last] == [(), (), (), (8,)]
    assert [m.weight for m in last] == [0, 0, 0, 4]


@pytest.mark.parametrize(
    ("changes", "error", "numbers"),
    [
        ({"batch_size": 7}, ConfigError, ["batch_size is 7", "4 ranks", "2 micro", "at least 8"]),
        ({"num_samples": 3}, DataError, ["3 training samples", "4 ranks"]),
        ({"num_samples": 0}, DataError, ["0 training samples"]),
        ({"rank": 4}, ConfigError, ["rank is 4", "0 to 3"]),
        ({"micro_batches": 0}, ConfigError, ["micro_batches is 0"]),
        ({"seed": -1}, ConfigError, ["seed is -1"]),
        ({"shares": RankShares((2.0, 1.0))}, ConfigError, ["2,1", "2 numbers", "4 ranks"]),
        ({"shares": RankShares((2, 1, -1, 1))}, ConfigError, ["2,1,-1,1", "rank 2", "share -1"]),
        ({"shares": RankShares((0, 0, 0, 0))}, ConfigError, ["0,0,0,0", "rank 0"]),
        ({"shares": RankShares((5, 1, 1, 1))}, ConfigError, ["rank 1 1 of 8", "needs 2"]),
    ],
)
def test_impossible_sizes_are_refused_with_the_numbers(
    changes: dict[str, Any], error: type[Exception], numbers: list[str]
) -> None:
    sizes: dict[str, Any] = {
        "num_samples": 50,
        "batch_size": 8,
        "world_size": 4,
        "rank": 0,
        "micro_batches": 2,
    }
    with pytest.raises(error) as raised:
        Batches(**{**sizes, **changes})
    assert all(number in str(raised.value) for number in numbers)


@pytest.mark.parametrize(("epoch", "step"), [(0, 5), (0, -1), (-1, 0)])
def test_a_position_outside_the_epoch_is_refused(epoch: int, step: int) -> None:
    with raises(ConfigError, "out-of-range", 0, 4):
        Batches(50, 10, 1, 0).step(epoch, step)


def test_millions_of_samples_are_held_as_numbers_of_four_bytes() -> None:
    batches = Batches(3_000_000, 32, 2, 0)
    (micro_batch,) = batches.step(0, batches.steps_per_epoch - 1)
    assert all(type(index) is int for index in micro_batch.indices)
    assert batches._order._order is not None
    assert batches._order._order.nbytes == 12_000_000


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 6))
def test_an_evaluation_covers_every_sample_once(
    num_samples: int, batch_size: int, world_size: int
) -> None:
    batches = [
        batch
        for rank in range(world_size)
        for batch in evaluation_shares(num_samples, batch_size, world_size=world_size, rank=rank)
    ]
    assert sorted(i for batch in batches for i in batch) == list(range(num_samples))
    assert all(1 <= len(batch) <= batch_size for batch in batches)


@given(st.integers(0, 1000), st.integers(1, 50))
def test_cuts_touch_and_differ_by_one_at_most(count: int, num_parts: int) -> None:
    parts = [cut(count, num_parts, part) for part in range(num_parts)]
    assert parts[0][0] == 0
    assert parts[-1][1] == count
    assert all(left[1] == right[0] for left, right in pairwise(parts))
    sizes = [end - begin for begin, end in parts]
    assert max(sizes) - min(sizes) <= 1


class Squares:
    """Samples (i, i*i), of which one may be broken."""

    def __init__(self, broken: Exception | None = None) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        if index == 13 and self.broken is not None:
            raise self.broken
        return torch.tensor(index), torch.ones(index if index == 17 else 3)


def task_over(data: Samples) -> Task:
    return Task(name="squares", model=nn.Linear(1, 1), train_data=data, loss=lambda m, b: b)


def test_a_batch_is_collated_in_the_order_of_its_indices() -> None:
    numbers, ones = load_batch(task_over(Squares()), Squares(), (4, 2, 9))
    assert numbers.tolist() == [4, 2, 9]
    assert ones.shape == (3, 3)


def test_a_broken_sample_is_named() -> None:
    data = Squares(broken=OSError("disk gone"))
    with raises(DataError, "sample-unreadable", 13, 20):
        load_batch(task_over(data), data, (12, 13))


def test_an_error_of_ours_from_a_sample_keeps_its_kind() -> None:
    data = Squares(broken=TaskError("no pictures here"))
    with raises(TaskError, "unnamed"):
        load_batch(task_over(data), data, (13,))


def test_samples_that_do_not_fit_together_are_named() -> None:
    with raises(DataError, "sample-unreadable", 16, 17):
        load_batch(task_over(Squares()), Squares(), (16, 17))
