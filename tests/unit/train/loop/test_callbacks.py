"""What a run calls of its callbacks, with what, and what becomes of their mistakes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dearmpi.comm.world import World
from dearmpi.errors import TaskError
from dearmpi.train.loop.callbacks import Fit
from dearmpi.train.settings.settings import RunSettings
from dearmpi.train.tasks.own_code import find_callbacks
from tests.codes import raises
from tests.unit.train.points import SGD, make_job, make_task, train


class Diary:
    """Every method, and what its run looked like."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def on_fit_start(self, fit: Fit) -> None:
        self.told.append(("start", fit.step, fit.total_steps, fit.folder.name))

    def on_step_end(self, fit: Fit) -> None:
        assert fit.loss is not None and fit.lr == 0.1
        assert all(bool(parameter.isfinite().all()) for parameter in fit.model.parameters())
        self.told.append(("step", fit.step))

    def on_evaluation_end(self, fit: Fit) -> None:
        assert fit.evaluation is not None
        self.told.append(("evaluation", fit.step, fit.evaluation.num_samples))

    def on_checkpoint_saved(self, fit: Fit) -> None:
        assert fit.checkpoint is not None
        self.told.append(("saved", fit.checkpoint.name))

    def on_fit_end(self, fit: Fit) -> None:
        assert fit.outcome is not None and fit.optimizer.state_dict()["state"] is not None
        self.told.append(("end", fit.outcome.step))


def test_methods_are_called_in_the_order_of_what_happens(alone: World, tmp_path: Path) -> None:
    diary, settings = Diary(), RunSettings(max_steps=3, **SGD)
    train(make_job(alone, settings, replace(make_task(), callbacks=[diary])), tmp_path / "a")
    assert diary.told == [
        ("start", 0, 3, "a"),
        ("step", 1),
        ("step", 2),
        ("step", 3),
        ("saved", "step-00000003"),
        ("evaluation", 3, 7),
        ("end", 3),
    ]


def test_one_of_a_file_is_called_beside_the_tasks(alone: World, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n\n\n"
        "class Mine:\n"
        "    def on_fit_end(self, fit):\n"
        "        (fit.folder / 'mine.txt').write_text(str(fit.step))\n"
    )
    diary = Diary()
    settings = RunSettings(max_steps=2, callback=f"{tmp_path / 'mine.py'}:Mine", **SGD)
    train(make_job(alone, settings, replace(make_task(), callbacks=[diary])), tmp_path / "a")
    assert (tmp_path / "a" / "mine.txt").read_text() == "2" and diary.told


class Failing:
    def on_step_end(self, fit: Fit) -> None:
        raise ValueError(f"not in step {fit.step}")


def test_what_one_raises_is_told_with_its_place(alone: World, tmp_path: Path) -> None:
    job = make_job(
        alone, RunSettings(max_steps=2, **SGD), replace(make_task(), callbacks=[Failing()])
    )
    with raises(TaskError, "task-code-failed", "Failing.on_step_end", "not in step 1", __file__):
        train(job, tmp_path)


class Misspelt:
    def on_steps_end(self, fit: Fit) -> None:
        pass


@pytest.mark.parametrize(
    ("callback", "refused"),
    [
        (Misspelt(), ("unknown-choice", "on_steps_end", "on_step_end")),
        (object(), ("task-invalid", "on_step_end")),
    ],
)
def test_what_would_never_be_called_is_refused(callback: object, refused: tuple[str, ...]) -> None:
    with raises(TaskError, *refused):
        find_callbacks(replace(make_task(), callbacks=[callback]), None)
