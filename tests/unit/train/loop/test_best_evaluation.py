"""The best evaluation: its checkpoint is kept, and a run ends early without better ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi.cli.console_listener import describe_outcome
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from dearmpi.train import checkpoint
from dearmpi.train.checkpoint.survey import go_back
from dearmpi.train.loop.evaluation import BestEvaluation, Outcome
from dearmpi.train.loop.session import settle
from dearmpi.train.metrics import step_times as step_totals
from dearmpi.train.settings.settings import RunSettings
from dearmpi.train.settings.sources import make_source
from tests.codes import raises
from tests.unit.train.points import SGD, Notes, make_job, make_task, squared_error, train

LOSSES = (9.0, 5.0, 3.0, 4.0, 2.0, math.nan, 6.0, 7.0, 1.0)  # held out, by the steps taken


def run(
    world: World, folder: Path, *, stop_after: int | None = None, **settings: Any
) -> tuple[Outcome, Notes, BestEvaluation]:
    """Eight steps at most, each evaluated, from the newest checkpoint on."""
    chosen = RunSettings(max_steps=8, eval_interval=1, **settings, **SGD)
    latest = checkpoint.find_latest(folder)
    snapshot = None if latest is None else checkpoint.load(latest)
    taken = [0 if snapshot is None else snapshot.step]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        taken[0] += model.training
        return squared_error(model, batch) if model.training else torch.tensor(LOSSES[taken[0]])

    job = make_job(world, chosen, make_task(loss), snapshot)
    outcome, notes = train(job, folder, stop_after=stop_after)
    return outcome, notes, job.best


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name[-2:]) for path in (folder / "checkpoints").iterdir())


def test_the_best_checkpoint_stays_beside_the_last(alone: World, tmp_path: Path) -> None:
    _, notes, _ = run(alone, tmp_path / "whole", keep_best=True, keep=1)
    saved = [int(name[-2:]) for name in notes.checkpoints]
    assert saved == [1, 2, 4, 8] and kept(tmp_path / "whole") == [8]  # the last is the best too
    other = tmp_path / "other"
    outcome, notes, best = run(alone, other, keep_best=True, keep=1, patience=3)
    assert (best.step, best.loss, best.num_worse, outcome.step) == (4, 2.0, 3, 7)
    assert kept(other) == [4, 7] and not outcome.stopped
    assert checkpoint.resolve(other / "best") == other / "checkpoints" / "step-00000004"
    (line,) = best.describe(scale=2.0)
    assert "4.0000 at step 4" in line and "after 3 evaluations" in line


def test_a_resumed_run_ends_where_the_whole_one_does(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_totals, "LONG_STEP_S", math.inf)
    whole, _, expected = run(alone, tmp_path / "whole", patience=2)
    assert (whole.step, whole.stopped) == (6, False)
    stopped, *_ = run(alone, tmp_path / "a", patience=2, stop_after=4)
    assert stopped.stopped and stopped.step < whole.step
    resumed, _, best = run(alone, tmp_path / "a", patience=2)
    assert (resumed.step, resumed.stopped, best) == (6, False, expected)
    again, notes, best = run(alone, tmp_path / "a", patience=2)
    assert (again.step, again.stopped, notes.steps, notes.rows, best) == (
        6,
        False,
        [],
        [],
        expected,
    )
    longer, *_ = run(alone, tmp_path / "a", patience=9)
    assert longer.step == 8


def test_an_evaluation_that_is_repeated_at_the_end_counts_once(
    alone: World, tmp_path: Path
) -> None:
    _, _, best = run(alone, tmp_path, patience=5)
    assert (best.num_worse, best.last_step) == (0, 8)
    again, notes, best = run(alone, tmp_path, patience=5)
    assert again.evaluation is not None and len(notes.rows) == 1
    assert (best.num_worse, best.last_step) == (0, 8)


def test_going_back_gives_up_a_later_best(alone: World, tmp_path: Path) -> None:
    run(alone, tmp_path, keep_best=True, keep=9)
    assert checkpoint.find_best(tmp_path) is not None
    go_back(tmp_path, tmp_path / "checkpoints" / "step-00000002")
    assert checkpoint.find_best(tmp_path) is None
    assert checkpoint.find_latest(tmp_path) == tmp_path / "checkpoints" / "step-00000002"


def test_a_first_loss_that_is_no_number_is_not_the_best() -> None:
    best = BestEvaluation(keeps=True, patience=3)
    assert [best.note(step, loss) for step, loss in enumerate((math.nan, 5.0, 6.0))] == [
        False,
        True,
        False,
    ]
    assert (best.step, best.loss, best.num_worse, best.is_over) == (1, 5.0, 1, False)


@pytest.mark.parametrize("name", ["keep_best", "patience"])
def test_without_held_out_data_there_is_no_best(name: str) -> None:
    with raises(ConfigError, "setting-without-effect", name):
        settle([make_source("flag", {name: "1"})], make_task(eval_count=0), None)


def test_the_summary_names_the_best(alone: World, tmp_path: Path) -> None:
    chosen = RunSettings(max_steps=1, keep_best=True, **SGD)
    job = make_job(alone, chosen)
    outcome, _ = train(job, tmp_path)
    assert any("lowest held-out loss" in line for line in describe_outcome(job, outcome, tmp_path))
