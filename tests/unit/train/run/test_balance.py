"""Balance: when shares of a batch change, by what, and what a resumed run makes of them."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from dearmpi import SyncBatchNorm
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from dearmpi.train.data.data import Batches
from dearmpi.train.loop import session
from dearmpi.train.loop.session import Session, open_session
from dearmpi.train.loop.trainer import Trainer
from dearmpi.train.run.balance import NUM_MEASURED, STEPS_BETWEEN, Balance, warn_of_batch_norm
from dearmpi.train.settings.settings import RunSettings
from dearmpi.train.settings.sources import make_source
from dearmpi.train.tasks.task import Task
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.unit.train.points import SGD, Notes, make_task


def changes(per_sample: list[float], *, num_steps: int, fixed: float = 0.0) -> list[Any]:
    """Steps after which shares change, and sizes then; each rank takes so long for a sample."""

    def body(world: World) -> list[Any]:
        batches = Batches(1000, 40, world.size, world.rank)
        balance, found = Balance(world, batches), list[Any]()
        for step in range(num_steps):
            sizes = batches.shares.sizes(40, world.size, 1)
            noise = 1.5 if step % 7 == world.rank else 1.0  # now and then, which a median ignores
            own_s = noise * (fixed + per_sample[world.rank] * sizes[world.rank])
            if balance.note(batches.samples_of(step), own_s):
                found.append((step, batches.shares.sizes(40, world.size, 1)))
        return found

    first, *others = run_ranks(len(per_sample), body)
    assert all(other == first for other in others)
    return list(first)


def test_a_slow_rank_gets_less_soon_and_shares_then_stay() -> None:
    assert changes([1.0, 2.0, 1.0, 1.0], num_steps=500) == [(NUM_MEASURED, (12, 6, 11, 11))]


def test_equal_ranks_stay_even() -> None:
    assert changes([1.0, 1.03], num_steps=500) == []


def test_a_rank_that_is_slow_besides_takes_several_changes_each_a_little_later() -> None:
    found = changes([1.0, 3.0], num_steps=500, fixed=10.0)
    steps = [step for step, _ in found]
    assert len(steps) >= 2 and steps[0] == NUM_MEASURED
    assert all(b - a in (NUM_MEASURED + 1, STEPS_BETWEEN + 1) for a, b in pairwise(steps))


@pytest.fixture
def _points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's task has the same model: ranks that are threads draw from one generator."""
    task = make_task()

    def build(spec: str, options: object) -> Task:
        return replace(task, model=copy.deepcopy(task.model))

    monkeypatch.setattr(session, "build_task", build)


def begin(world: World, folder: Path, **given: object) -> Session:
    values = {"task": "points", "max_steps": 2, "run_folder": str(folder), "name": "a", **SGD}
    return open_session(world, [make_source("flag", {**values, **given})])


def sizes(world: World, folder: Path, **given: object) -> tuple[int, ...]:
    job = begin(world, folder, **given).job
    job.optimizer.close()
    return job.batches.shares.sizes(8, world.size, 1)


@pytest.mark.usefixtures("_points")
@pytest.mark.parametrize("shares", ["3,1", "auto"])
def test_a_run_goes_on_with_its_shares_and_evenly_on_other_ranks(
    tmp_path: Path, shares: str
) -> None:
    (tmp_path / "a").mkdir()

    def work(world: World) -> None:
        job = begin(world, tmp_path, batch_shares=shares).job
        job.batches.shares.weights = (3.0, 1.0)  # as if they had been measured
        Trainer(job, tmp_path / "a", listener=Notes()).run()

    run_ranks(2, work)
    again: dict[str, object] = {"resume": "auto", "max_steps": 3}
    assert run_ranks(2, lambda world: sizes(world, tmp_path, **again)) == [(6, 2)] * 2
    assert run_ranks(3, lambda world: sizes(world, tmp_path, **again))[0] == (2, 3, 3)
    other = run_ranks(2, lambda world: sizes(world, tmp_path, batch_shares="1,3", **again))
    assert other == [(2, 6)] * 2


@pytest.mark.usefixtures("_points")
def test_weights_of_shards_stay_on_as_many_ranks(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()

    def work(world: World) -> Any:
        job = begin(world, tmp_path, shards="3,1", bucket_cap_mb=1).job
        Trainer(job, tmp_path / "a", listener=Notes()).run()
        return job.optimizer.config.shards

    def again(world: World) -> Any:
        job = begin(world, tmp_path, resume="auto", max_steps=3).job
        job.optimizer.close()
        return job.optimizer.config.shards

    assert run_ranks(2, work) == [(3.0, 1.0)] * 2
    assert run_ranks(2, again) == [(3.0, 1.0)] * 2
    assert run_ranks(3, again) == ["auto"] * 3


def test_batch_normalisation_of_one_rank_is_warned_of(alone: World) -> None:
    norm = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    shares = (2.0, 1.0)

    def body(world: World) -> list[int]:
        models = (norm, nn.Sequential(SyncBatchNorm(2)), nn.Linear(2, 2))
        return [len(warn_of_batch_norm(shares, world, model)) for model in models]

    assert run_ranks(2, body) == [[1, 0, 0]] * 2
    assert (
        "1 is a BatchNorm1d"
        in run_ranks(2, lambda world: warn_of_batch_norm(shares, world, norm)[0])[0]
    )
    assert warn_of_batch_norm(shares, alone, norm) == []


def test_local_steps_do_not_share_unevenly() -> None:
    with raises(ConfigError, "settings-contradict", "sync_every is 4", "batch_shares"):
        RunSettings(batch_shares=(2.0, 1.0), sync_every=4)
