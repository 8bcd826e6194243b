"""Groups of ranks: worlds of their own over the job's progress, and what is refused."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer, SyncBatchNorm
from dearmpi.comm.watchdog.waits import Status
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError, MismatchError
from tests.codes import raises
from tests.fakes.ranks import run_ranks


def test_a_group_has_ranks_hosts_and_calls_of_its_own() -> None:
    def body(world: World) -> Any:
        group = world.group([3, 1])
        if group is None:
            return None
        return (
            (group.rank, group.size, group.job_ranks, group.local_rank),
            group.all_reduce([world.rank + 1.0]),
            group.all_gather_text(f"rank {world.rank}"),
            group.broadcast_object(world.rank, root=1),
        )

    shared = ([6.0], ["rank 3", "rank 1"], 1)
    assert run_ranks(4, body) == [
        None,
        ((1, 2, (3, 1), 1), *shared),
        None,
        ((0, 2, (3, 1), 0), *shared),
    ]


def test_colors_split_the_ranks_and_none_belongs_to_no_group() -> None:
    def body(world: World) -> Any:
        colors: list[int | str | None] = ["a", 7, "a", None, 7]
        group = world.split(colors[world.rank])
        return group and (group.job_ranks, group.mean(float(world.rank)))

    assert run_ranks(5, body) == [
        ((0, 2), 1.0),
        ((1, 4), 2.5),
        ((0, 2), 1.0),
        None,
        ((1, 4), 2.5),
    ]


def test_true_and_one_are_the_same_color() -> None:
    def body(world: World) -> Any:
        group = world.split(True if world.rank else 1)
        return group and group.job_ranks

    assert run_ranks(2, body) == [(0, 1)] * 2


def test_a_group_of_a_group_knows_the_ranks_of_the_job() -> None:
    def body(world: World) -> Any:
        half = world.split(world.rank % 2)
        assert half is not None
        single = half.group([1])
        return (half.job_ranks, single and single.job_ranks)

    assert run_ranks(4, body) == [
        ((0, 2), None),
        ((1, 3), None),
        ((0, 2), (2,)),
        ((1, 3), (3,)),
    ]


def test_two_optimizers_train_on_two_groups_at_once() -> None:
    """A 2 x 2 grid: rows hold one model each, columns another."""

    def body(world: World) -> tuple[Tensor, Tensor]:
        row, column = world.split(world.rank // 2), world.split(world.rank % 2)
        assert row is not None and column is not None
        found = []
        models = [nn.Linear(4, 3, bias=False).double() for _ in range(2)]
        optimizers = []
        for model, group in zip(models, (row, column), strict=True):
            nn.init.zeros_(model.weight)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            optimizers.append(DistributedOptimizer(inner, model, world=group))
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            gradient = 1.0 + world.rank
            torch.stack([(model.weight * gradient).sum() for model in models]).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.close()
            found.append(model.weight.detach())
        return found[0], found[1]

    for rank, (by_row, by_column) in enumerate(run_ranks(4, body)):
        row_mean, column_mean = 1.5 + 2 * (rank // 2), 2.0 + rank % 2
        assert torch.equal(by_row, torch.full((3, 4), -3 * row_mean, dtype=torch.float64))
        assert torch.equal(by_column, torch.full((3, 4), -3 * column_mean, dtype=torch.float64))


def test_three_optimizers_train_on_groups_that_overlap_in_a_circle() -> None:
    """Every rank is in two of the three, and takes them in the same order."""

    def body(world: World) -> list[Tensor]:
        found = []
        pairs = [world.group([one, (one + 1) % 3]) for one in range(3)]
        groups = [group for group in pairs if group is not None]
        models = [nn.Linear(4, 3, bias=False).double() for _ in groups]
        optimizers = []
        for model, group in zip(models, groups, strict=True):
            nn.init.zeros_(model.weight)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            optimizers.append(DistributedOptimizer(inner, model, world=group))
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                (model(torch.ones(1, 4).double()).sum() * 2**world.rank).backward()
                optimizer.step()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.close()
            found.append(model.weight.detach())
        return found

    means = {(0, 1): 1.5, (1, 2): 3.0, (2, 0): 2.5}
    of_ranks = [[(0, 1), (2, 0)], [(0, 1), (1, 2)], [(1, 2), (2, 0)]]
    for weights, pairs in zip(run_ranks(3, body), of_ranks, strict=True):
        for weight, pair in zip(weights, pairs, strict=True):
            assert torch.equal(weight, torch.full((3, 4), -3 * means[pair], dtype=torch.float64))


def test_batch_normalisation_is_over_the_group_that_trains_it() -> None:
    def body(world: World) -> tuple[float, float]:
        group = world.split(world.rank // 2)
        assert group is not None
        model = nn.Sequential(SyncBatchNorm(1, world=group))
        saved = BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        read = torch.load(saved, weights_only=False)
        with raises(ConfigError, "settings-contradict", "world=group"):
            read(torch.zeros(2, 1))
        optimizer = torch.optim.SGD(read.parameters(), lr=0.1)
        distributed = DistributedOptimizer(optimizer, read, world=group)
        for layer in (model, read):
            layer(torch.tensor([[0.0], [2.0]]) + world.rank)
        distributed.close()
        means = [float(layer.get_buffer("0.running_mean")) for layer in (model, read)]
        return means[0], means[1]

    for rank, found in enumerate(run_ranks(4, body)):
        mean = 1.5 + 2 * (rank // 2)
        assert found == pytest.approx((0.1 * mean, 0.1 * mean))


def test_ranks_that_ask_for_different_groups_are_told_on_all() -> None:
    def body(world: World) -> str:
        with raises(MismatchError, "ranks-in-different-calls") as caught:
            world.group([0, 1] if world.rank < 2 else [2, 3])
        return str(caught.value)

    for told in run_ranks(4, body):
        assert "ranks 0-1" in told and "world.group([2, 3])" in told


def test_calls_that_differ_within_a_group_are_told_with_the_group() -> None:
    def body(world: World) -> str:
        group = world.split(world.rank // 2)
        assert group is not None
        if world.rank < 2:
            return str(group.mean(1.0))
        with raises(MismatchError, "ranks-in-different-calls") as caught:
            group.barrier() if world.rank == 2 else group.mean(1.0)
        return str(caught.value)

    one, two, *told = run_ranks(4, body)
    assert one == two == "1.0"
    for text in told:
        assert "of ranks 2-3" in text and "rank 2 (" in text and "rank 3 (" in text, text


@pytest.mark.parametrize(
    ("ranks", "code"),
    [([], "out-of-range"), ([0, 0], "out-of-range"), ([2], "out-of-range"), ([-1], "out-of-range")]
    + [([0.5], "wrong-type"), ([True], "wrong-type"), (1, "wrong-type"), ("01", "wrong-type")],
)
def test_ranks_that_there_are_not_are_refused(ranks: Any, code: str) -> None:
    def body(world: World) -> None:
        with raises(ConfigError, code):
            world.group(ranks)
        world.barrier()

    run_ranks(2, body)


def test_what_one_rank_alone_asks_wrongly_is_refused_on_all() -> None:
    """And all go on."""

    def body(world: World) -> str:
        with raises(ConfigError, "wrong-type", "1.5 on rank 1 of 2"):
            world.split(1.5 if world.rank else 1)  # type: ignore[arg-type]
        with raises(MismatchError, "ranks-in-different-calls", "world.group([0, 9])"):
            world.group([0, 9] if world.rank else [0, 1])
        return world.all_gather_text("goes on")[0]

    assert run_ranks(2, body) == ["goes on"] * 2


def test_whole_numbers_of_numpy_are_ranks_and_colors() -> None:
    def body(world: World) -> Any:
        made = world.group(np.arange(2)), world.split(np.int64(world.rank // 2))
        return [group and group.job_ranks for group in made]

    assert run_ranks(3, body) == [[(0, 1), (0, 1)], [(0, 1), (0, 1)], [None, (2,)]]


def test_a_group_ends_with_the_job() -> None:
    def body(world: World) -> None:
        group = world.group([0, 1])
        assert group is not None and not group.is_closed
        for end in (group.close, group.leave):
            with raises(ConfigError, "settings-contradict", "dearmpi.connect()"):
                end()
        world.close()
        assert group.is_closed

    run_ranks(2, body)


def status(group: str, calls: dict[str, int], **changes: Any) -> Status:
    plain: dict[str, Any] = {
        "backprops": 0,
        "steps": 0,
        "exchanges": 5,
        "waiting": "something",
        "waited_s": 9.0,
        "in_exchange": True,
        "left": False,
        "stack": (),
        "group": group,
        "in_groups": calls,
    }
    return Status(**{**plain, **changes})


def test_groups_that_wait_for_each_other_in_turn_are_found() -> None:
    """Ranks 0 and 1 share both groups, and call them in different order."""
    first = status("a", {"a": 1, "b": 0})
    second = status("b", {"a": 0, "b": 1})
    assert first.waits_for(second) and second.waits_for(first)


def test_a_rank_outside_of_a_group_is_not_what_its_members_wait_for() -> None:
    member = status("a", {"a": 1})
    assert not member.waits_for(status("", {}, in_exchange=False, exchanges=0))
    assert not member.waits_for(status("b", {"b": 3}))
    assert not member.waits_for(status("a", {"a": 1}))
    assert member.waits_for(status("", {"a": 0}, in_exchange=False))


def test_steps_on_different_groups_do_not_compare() -> None:
    busy = status("", {"a": 0}, in_exchange=False, steps=9, backprops=9)
    assert not busy.waits_for(status("", {"b": 0}, in_exchange=False, steps=2, backprops=2))
