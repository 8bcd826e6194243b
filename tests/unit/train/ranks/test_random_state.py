"""Random numbers go on after a restore as if nothing had happened in between."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dearmpi.comm.world import World
from dearmpi.errors import CheckpointError
from dearmpi.train import checkpoint
from dearmpi.train.ranks.random_state import capture_random_state, restore_random_state, seed_all
from dearmpi.train.settings.settings import RunSettings
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.unit.train.points import SGD, make_job, make_task, train


@pytest.fixture(autouse=True)
def leave_random_state_alone() -> Iterator[None]:
    state = capture_random_state()
    yield
    restore_random_state(state)


def draw() -> list[float]:
    return [
        *torch.randn(3).tolist(),
        torch.randint(0, 1000, (1,)).item(),
        *np.random.standard_normal(3).tolist(),
        np.random.randint(1000),
        random.gauss(0, 1),
        random.random(),
    ]


def test_numbers_go_on_bit_for_bit_after_a_trip_through_json() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    draw()  # an odd number of normal variates: both generators keep one in store
    text = json.dumps(capture_random_state())
    expected = [draw() for _ in range(2)]
    torch.manual_seed(4)
    np.random.seed(4)
    random.seed(4)
    assert draw() != expected[0]
    restore_random_state(json.loads(text))
    assert [draw() for _ in range(2)] == expected


@pytest.mark.parametrize("name", ["torch", "numpy", "python"])
def test_a_state_of_another_kind_is_refused(name: str) -> None:
    state = capture_random_state()
    with raises(CheckpointError, "random-state-misfit"):
        restore_random_state(state | {name: "AAAA"})
    del state[name]
    with raises(CheckpointError, "random-state-misfit"):
        restore_random_state(state)


def drawn(*parts: int) -> tuple[float, float, float]:
    seed_all(*parts)
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_the_same_parts_give_the_same_numbers() -> None:
    assert drawn(5, 1) == drawn(5, 1)


@pytest.mark.parametrize("other", [(5, 0), (5, 0, 0), (0, 5), (6,)])
def test_other_parts_give_other_numbers(other: tuple[int, ...]) -> None:
    """Else the noise of rank 0 would repeat the numbers that the model began with."""
    assert all(one != two for one, two in zip(drawn(5), drawn(*other), strict=True))


def test_each_rank_draws_its_own_numbers_on_devices_that_the_run_comes_to_later(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was begun on CPUs: what is restored says nothing of a device's generator."""
    train(make_job(alone, RunSettings(max_steps=3, **SGD)), tmp_path)
    stored = checkpoint.load(tmp_path / "checkpoints" / "step-00000003")
    snapshot = replace(stored, random=stored.random * 2)
    settings, seeds = RunSettings(max_steps=7, **SGD), dict[str, int]()

    def note(seed: int) -> None:
        seeds[threading.current_thread().name] = seed

    monkeypatch.setattr(torch.cuda, "manual_seed_all", note)
    tasks = [make_task(), make_task()]
    seed_all(settings.seed)

    def rank(world: World) -> None:
        make_job(world, settings, tasks[world.rank], snapshot).optimizer.close()

    run_ranks(2, rank)
    assert len(seeds) == len(set(seeds.values())) == 3  # the model's, and one for each rank
