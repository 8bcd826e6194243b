"""Run summaries: what the folders of runs hold, side by side for people."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from dearmpi.errors import ConfigError
from dearmpi.plan.data.fields import regular_file
from dearmpi.report.draw.units import digits, time_text, value_text
from dearmpi.train.checkpoint.survey import list_runs
from dearmpi.train.metrics import metrics
from dearmpi.train.metrics.metrics import MetricsRow
from dearmpi.train.run.run_folder import RunFolder

_UNKNOWN = "-"
_OF_THE_PLACE = ("run_folder",)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run, as far as its files can be read.

    settings, environment: of config.yaml and env.json; empty where missing. rows: of the metrics.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[MetricsRow] = ()

    @property
    def step(self) -> int | None:
        """The last step with a row."""
        return self.rows[-1].step if self.rows else None

    @property
    def loss(self) -> float | None:
        """The last row's training loss."""
        return next((row.loss for row in reversed(self.rows) if row.loss is not None), None)

    @property
    def evaluations(self) -> list[MetricsRow]:
        """The rows with a held-out loss."""
        return [row for row in self.rows if row.eval_loss is not None]

    @property
    def best(self) -> MetricsRow | None:
        """The row of the lowest held-out loss; a NaN never is."""
        numbers = [row for row in self.evaluations if not math.isnan(_held_out(row))]
        return min(numbers, key=_held_out, default=None)

    def typical(self, column: str) -> float | None:
        """The median over rows of a column; None where no row has it."""
        values = [value for row in self.rows if (value := getattr(row, column)) is not None]
        return median(values) if values else None

    def loss_at(self, step: int) -> float | None:
        """The training loss in the row of ``step``; None where there is none."""
        return next((row.loss for row in self.rows if row.step == step), None)

    @property
    def started(self) -> str:
        """When the run, or its last part, began."""
        return str(self.environment.get("started", _UNKNOWN)).replace("T", " ")[:16]

    @property
    def num_ranks(self) -> str:
        """How many ranks trained last."""
        return str(self.environment.get("world_size", _UNKNOWN))


def _held_out(row: MetricsRow) -> float:
    assert row.eval_loss is not None
    return row.eval_loss


def summarize_run(path: Path) -> RunSummary:
    """Read the run folder at ``path``. What is missing or broken in it is left out; ConfigError
    where it is no run folder.
    """
    folder = RunFolder.open(path)
    settings = _read(folder.config, yaml.safe_load, yaml.YAMLError)
    environment = _read(folder.environment, json.loads, ValueError)
    try:
        rows = metrics.read(folder.path)
    except (OSError, ValueError, TypeError):
        rows = []
    return RunSummary(path.name or str(path), settings, environment, rows)


def _read(path: Path, parse: Callable[[str], Any], failure: type[Exception]) -> Mapping[str, Any]:
    try:
        content = parse(regular_file(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, failure):
        return {}
    return content if isinstance(content, dict) else {}


def table_of_runs(root: Path) -> list[tuple[str, ...]]:
    """A header, and a row for each run in ``root`` in the order in which they began.

    Raises ConfigError where there are none.
    """
    paths = list_runs(root)
    if not paths:
        raise ConfigError(
            f"{root} holds no runs; give the folder that --run-folder names", code="no-run"
        )
    runs = sorted(map(summarize_run, paths), key=lambda run: run.started)
    header = ("run", "task", "ranks", "step", "loss", "held out", "best", "samples/s", "started")
    return [header, *map(_row, runs)]


def _row(run: RunSummary) -> tuple[str, ...]:
    last = run.evaluations[-1].eval_loss if run.evaluations else None
    return (
        run.name,
        str(run.settings.get("task", _UNKNOWN)),
        run.num_ranks,
        _UNKNOWN if run.step is None else str(run.step),
        _number(run.loss),
        _number(last),
        _best(run),
        _number(run.typical("samples_per_s")),
        run.started,
    )


def _best(run: RunSummary) -> str:
    return _UNKNOWN if run.best is None else f"{_number(run.best.eval_loss)} ({run.best.step})"


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else value_text(value) if abs(value) < 100 else digits(value)


def table_of_differences(paths: Sequence[Path]) -> list[tuple[str, ...]]:
    """A header, the settings in which the runs at ``paths`` differ, and what came of them.

    Raises ConfigError for a path that is no run folder.
    """
    runs = [summarize_run(path) for path in paths]
    settings = [
        (name, *(str(run.settings.get(name, _UNKNOWN)) for run in runs))
        for name in dict.fromkeys(name for run in runs for name in run.settings)
        if name not in _OF_THE_PLACE
    ]
    differing = [row for row in settings if len(set(row[1:])) > 1]
    versions = dict.fromkeys(n for run in runs for n in run.environment.get("versions", {}))
    made_with = [
        (name, *(str(run.environment.get("versions", {}).get(name, _UNKNOWN)) for run in runs))
        for name in versions
    ]
    made_with.append(
        ("git commit", *(str(run.environment.get("git_commit") or _UNKNOWN)[:12] for run in runs))
    )
    differing += [row for row in made_with if len(set(row[1:])) > 1]
    return [("", *(run.name for run in runs)), *differing, *_results(runs)]


def _results(runs: Sequence[RunSummary]) -> list[tuple[str, ...]]:
    rows = [
        ("ranks", *(run.num_ranks for run in runs)),
        ("step", *(_UNKNOWN if run.step is None else str(run.step) for run in runs)),
        ("loss", *(_number(run.loss) for run in runs)),
    ]
    common = set.intersection(*({row.step for row in run.rows} for run in runs))
    if common and len({run.step for run in runs}) > 1:
        step = max(common)
        rows.append((f"loss at step {step}", *(_number(run.loss_at(step)) for run in runs)))
    rows.append(("best held out (step)", *map(_best, runs)))
    rows.append(("samples/s", *(_number(run.typical("samples_per_s")) for run in runs)))
    for column, label in (("step_s", "step"), ("exposed_s", "waits for communication")):
        times = [run.typical(column) for run in runs]
        rows.append((f"{label}, median", *(_UNKNOWN if t is None else time_text(t) for t in times)))
    return [row for row in rows if any(cell != _UNKNOWN for cell in row[1:])]
