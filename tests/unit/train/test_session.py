"""What a run begins with is what was asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dearmpi.comm.world import World
from dearmpi.train import session
from dearmpi.train.data import MicroBatch
from dearmpi.train.session import open_session
from dearmpi.train.sources import make_source
from tests.unit.train.points import SGD, equal, make_task, parameters


@pytest.fixture(autouse=True)
def _points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task is that of a few points."""
    monkeypatch.setattr(session, "build_task", lambda spec, options: make_task())


def begin(world: World, **given: object) -> tuple[list[Tensor], tuple[MicroBatch, ...]]:
    """The model, and the samples of the first step."""
    source = make_source("flag", {"task": "points", "max_steps": 1, **SGD, **given})
    job = open_session(world, [source]).job
    job.optimizer.close()
    return parameters(job.task.model), job.batches.step(0, 0)


def test_the_seed_decides_on_the_model_and_on_the_order_of_the_samples(alone: World) -> None:
    model, samples = begin(alone, seed=5)
    same_model, same_samples = begin(alone, seed=5)
    other_model, other_samples = begin(alone, seed=6)
    assert equal(same_model, model) and same_samples == samples
    assert not equal(other_model, model) and other_samples != samples


def test_torch_is_told_whether_operators_must_repeat(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # else it would be set for good
    told: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", told.append)
    begin(alone, deterministic=True)
    begin(alone, deterministic=False)
    assert told == [True, False]
