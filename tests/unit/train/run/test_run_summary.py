"""Runs side by side."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from dearmpi.cli.main import main
from dearmpi.errors import ConfigError
from dearmpi.train.metrics.metrics import MetricsLog, MetricsRow
from dearmpi.train.run.run_summary import summarize_run, table_of_differences, table_of_runs
from tests.codes import raises

VERSIONS = {"torch": "2.13.0", "numpy": "2.1"}


def make_run(root: Path, name: str, *, lr: float, losses: list[float], started: str) -> Path:
    folder = root / name
    (folder / "checkpoints").mkdir(parents=True)
    settings = {"task": "digits", "lr": lr, "seed": 0, "run_folder": str(root)}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    environment = {"world_size": 2, "started": started, "versions": VERSIONS, "git_commit": None}
    (folder / "env.json").write_text(json.dumps(environment))
    with MetricsLog(folder) as log:
        for step, loss in enumerate(losses, 1):
            log.append(
                MetricsRow(10 * step, 0, loss=loss, eval_loss=2 * loss, samples_per_s=50.0 * step)
            )
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_run(tmp_path, "late", lr=0.5, losses=[3.0, 1.5, 2.5], started="2026-02-01T10:00:00")
    make_run(tmp_path, "early", lr=0.25, losses=[4.0, 3.0], started="2026-01-01T10:00:00")
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    return tmp_path


def test_runs_are_listed_in_the_order_in_which_they_began(root: Path) -> None:
    header, *rows = table_of_runs(root)
    assert [row[0] for row in rows] == ["empty", "early", "late"]
    late = dict(zip(header, rows[-1], strict=True))
    assert late["step"] == "30" and late["loss"] == "2.5000" and late["held out"] == "5.0000"
    assert late["best"] == "3.0000 (20)" and late["samples/s"] == "100"
    assert late["started"] == "2026-02-01 10:00" and late["ranks"] == "2"
    assert set(rows[0][1:]) == {"-"}


def test_runs_are_compared_by_what_differs_and_what_came_of_it(root: Path) -> None:
    table = {row[0]: row[1:] for row in table_of_differences([root / "early", root / "late"])}
    assert table[""] == ("early", "late") and table["lr"] == ("0.25", "0.5")
    assert "seed" not in table and "torch" not in table and "run_folder" not in table
    assert table["loss at step 20"] == ("3.0000", "1.5000")
    assert table["best held out (step)"] == ("6.0000 (20)", "3.0000 (20)")
    assert "step, median" not in table  # no row has it


def test_a_loss_that_is_no_number_is_never_the_best(tmp_path: Path) -> None:
    losses = [math.nan, 4.0, 5.0]
    run = summarize_run(make_run(tmp_path, "a", lr=1.0, losses=losses, started="2026-01-01"))
    assert run.best is not None and (run.best.step, run.best.eval_loss) == (20, 8.0)
    lost = summarize_run(make_run(tmp_path, "b", lr=1.0, losses=[math.nan], started="2026-01-01"))
    assert lost.best is None


def test_a_damaged_file_is_left_out(root: Path) -> None:
    (root / "late" / "config.yaml").write_text("{")
    (root / "late" / "env.json").write_text("[]")
    (root / "late" / "metrics.csv").write_text("step,epoch,loss\nx,y,z\n")
    run = summarize_run(root / "late")
    assert (run.settings, run.environment, run.rows) == ({}, {}, [])


def test_what_holds_no_runs_is_refused(root: Path) -> None:
    with raises(ConfigError, "no-run", "--run-folder"):
        table_of_runs(root / "notes")
    with raises(ConfigError, "no-run"):
        table_of_differences([root / "late", root / "notes"])


def test_the_commands_print_the_tables(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(root)]) == 0
    assert "digits" in capsys.readouterr().out
    assert main(["compare", str(root / "early"), str(root / "late")]) == 0
    assert "best held out (step)" in capsys.readouterr().out
    assert main(["compare", str(root / "early")]) == 2
