"""Means of numbers, and objects that ranks hand each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dearmpi.comm.messages import values as encoding
from dearmpi.comm.world import World
from dearmpi.config import ProgressMode
from dearmpi.errors import ConfigError
from tests.codes import raises
from tests.fakes.ranks import run_ranks


class Unreadable:
    """It pickles, and nobody can read it."""

    def __reduce__(self) -> Any:
        return (int, ("no number",))


@pytest.mark.parametrize("progress", ["thread", "poll"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_mean_is_a_number_of_a_number_and_a_list_of_a_list(
    size: int, progress: ProgressMode
) -> None:
    def rank(world: World) -> list[Any]:
        loss = torch.tensor(2.0 * world.rank, requires_grad=True)
        return [
            world.mean(float(world.rank)),
            world.mean(loss),
            world.mean([loss, 5]),
            world.mean(torch.arange(2.0) * world.rank),
            world.mean(np.ones(1)),
            world.mean([]),
            world.all_reduce([world.rank, 1.0], op="mean"),
        ]

    middle = (size - 1) / 2
    expected = [
        middle,
        2 * middle,
        [2 * middle, 5.0],
        [0.0, middle],
        [1.0],
        [],
        [middle, 1.0],
    ]
    assert run_ranks(size, rank, progress=progress) == [expected] * size


@pytest.mark.parametrize(
    ("values", "code", "told"),
    [
        ("text", "wrong-type", "type str"),
        ({"loss": 1.0}, "wrong-type", "type dict"),
        ([1.0, None], "wrong-type", "type NoneType"),
        ([[1.0], 2.0], "values-not-flat", "unequal lengths"),
        (torch.ones(2, 3), "values-not-flat", "(2, 3)"),
        (torch.tensor([1 + 2j]), "wrong-type", "type complex"),
        (np.array(["loss"]), "wrong-type", "type str"),
        ([10**400], "out-of-range", "1329 bits"),
    ],
)
def test_what_is_no_number_is_refused_before_it_is_sent(values: Any, code: str, told: str) -> None:
    def rank(world: World) -> None:
        with raises(ConfigError, code, told):
            world.all_reduce(values)

    run_ranks(1, rank)


@pytest.mark.parametrize("progress", ["thread", "poll"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_objects_are_gathered_and_broadcast(size: int, progress: ProgressMode) -> None:
    def rank(world: World) -> list[Any]:
        own = {"rank": world.rank, "bytes": b"\0\1\0" * world.rank, "text": "\udcff"}
        last = world.broadcast_object(own, root=world.size - 1)
        return [world.all_gather_object(own), last, world.broadcast_object(), world.rank]

    for own, result in enumerate(run_ranks(size, rank, progress=progress)):
        every = [{"rank": r, "bytes": b"\0\1\0" * r, "text": "\udcff"} for r in range(size)]
        assert result == [every, every[-1], None, own]


def test_tensors_are_objects_too() -> None:
    def rank(world: World) -> float:
        sent = world.all_gather_object({"loss": torch.full((1000,), 1.0 + world.rank)})
        return sum(float(one["loss"].sum()) for one in sent)

    assert run_ranks(2, rank) == [3000.0] * 2


def test_what_cannot_be_pickled_is_one_error_on_all_ranks_and_they_go_on() -> None:
    def rank(world: World) -> tuple[str, str, list[int]]:
        told = []
        for call in (world.all_gather_object, lambda x: world.broadcast_object(x, root=1)):
            with raises(ConfigError, "object-not-sent") as caught:
                call((lambda: 0) if world.rank == 1 else 0)
            told.append(str(caught.value))
        with raises(ConfigError, "out-of-range", 9, 3):
            world.broadcast_object(0, root=9)
        return told[0], told[1], world.all_gather_object(world.rank)

    results = run_ranks(3, rank)
    assert results == [results[0]] * 3
    for told in results[0][:2]:
        assert told.startswith("an object of type function on rank 1 on fakehost cannot be pickled")
    assert results[0][2] == [0, 1, 2]


def test_what_only_the_root_gives_counts() -> None:
    """The others' would not have to be pickled."""

    def rank(world: World) -> Any:
        return world.broadcast_object(7 if world.is_root else lambda: 0)

    assert run_ranks(2, rank) == [7, 7]


def test_more_than_mpi_can_count_is_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MOST_BYTES", 1000)

    def rank(world: World) -> None:
        large = b"x" * (600 * world.rank)
        with raises(ConfigError, "object-not-sent", "on rank 1", "bytes, and 2 of", 1000):
            world.all_gather_object(large)
        assert len(world.broadcast_object(large, root=1)) == 600

    run_ranks(2, rank)


def test_what_cannot_be_read_is_an_error_of_the_reader() -> None:
    def rank(world: World) -> None:
        with raises(ConfigError, "object-not-read", f"rank {world.rank} on", "Value"):
            world.all_gather_object(Unreadable())

    run_ranks(2, rank)


@pytest.mark.parametrize("call", ["broadcast", "all_gather"])
def test_an_object_in_place_of_a_tensor_is_led_on(call: str) -> None:
    def rank(world: World) -> None:
        with raises(ConfigError, "wrong-type", "type dict", "broadcast_object(x)"):
            getattr(world, call)({"epoch": 3})

    run_ranks(1, rank)


def test_a_world_says_which_rank_it_is() -> None:
    assert run_ranks(2, repr) == [
        "World(rank=0, size=2, host='fakehost')",
        "World(rank=1, size=2, host='fakehost')",
    ]
