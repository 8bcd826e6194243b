"""Rows of metrics: what they tell of communication."""

from __future__ import annotations

from pathlib import Path

import pytest

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.engine.trace.spans import IterationTimes
from dearmpi.train.settings.settings import RunSettings
from tests.unit.train.points import SGD, make_job, train


def test_times_of_communication_are_means_per_step_and_what_is_hidden_is_the_rest(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DistributedOptimizer, "times", IterationTimes(0.25, 1.0))
    settings = RunSettings(max_steps=5, log_interval=2, **SGD)
    outcome, notes = train(make_job(alone, settings), tmp_path)
    assert [row.step for row in notes.rows] == [2, 3, 4, 5]
    assert {(row.exposed_s, row.communication_s) for row in notes.rows} == {(0.25, 1.0)}
    assert outcome.hidden_share == 0.75
