"""Metrics: one row per logged step, in metrics.csv for people and metrics.jsonl for programs."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from dearmpi.errors import ConfigError, UsageError
from dearmpi.plan.data.fields import regular_file
from dearmpi.train import disk
from dearmpi.train.metrics.step_times import LISTS, SUMMARY, RankTimes, rank_columns
from dearmpi.train.metrics.trackers import Trackers

Number = int | float | None


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """What was measured at one step; None where it was not.

    elapsed_s: seconds since this process began to train.
    grad_norm: norm of the whole gradient before clipping.
    step_s, exposed_s, communication_s: means per step since the row before.
    sent_mb, owed_share, fallbacks: of rank 0, as ``optimizer.traffic`` gives them.
    extra: the task's own metrics by name.
    ranks: every rank's means per step since the row before; in metrics.jsonl only.
    """

    step: int
    epoch: int
    elapsed_s: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    samples_per_s: float | None = None
    step_s: float | None = None
    exposed_s: float | None = None
    communication_s: float | None = None
    sent_mb: float | None = None
    owed_share: float | None = None
    fallbacks: int | None = None
    eval_loss: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)
    ranks: tuple[RankTimes, ...] = ()

    def values(self) -> dict[str, Number]:
        """Return the row's values by column."""
        return {name: getattr(self, name) for name in COLUMNS} | dict(self.extra)


COLUMNS = tuple(f.name for f in fields(MetricsRow) if f.name not in ("extra", "ranks"))
INTEGERS = ("step", "epoch", "fallbacks")
_TAKEN = (*COLUMNS, "extra", *LISTS, SUMMARY)


class MetricsLog:
    """Appends rows to the metrics files of a run folder, whole lines at a time.

    extra: names of the task's own metrics, each a column.
    resume_step: the step that the run goes on from: rows of later steps are dropped, so that no
        step appears twice. A half line that a killed writer left behind is dropped as well.
    trackers: take each row as well; closed with the files.
    last_step: the step of the last row, -1 before there is one.

    Raises ConfigError for names that cannot be columns.
    """

    def __init__(
        self,
        run_folder: Path,
        *,
        extra: Sequence[str] = (),
        resume_step: int | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        check_names(extra)
        self._trackers = trackers
        csv, jsonl = run_folder / "metrics.csv", run_folder / "metrics.jsonl"
        try:
            old = [row for row in _read_csv(csv) if _wanted(row, resume_step)]
            known = [name for row in old[:1] for name in row if name not in COLUMNS]
            self._columns = (*COLUMNS, *dict.fromkeys([*known, *extra]))
            self.last_step = max((int(row["step"]) for row in old), default=-1)
            disk.write_text(csv, self._csv_text(old))
            kept = [line for line in _read_lines(jsonl) if _wanted(_parse(line), resume_step)]
            disk.write_text(jsonl, "".join(line + "\n" for line in kept))
            self._csv: BinaryIO = open(csv, "ab", buffering=0)  # noqa: SIM115
            self._jsonl: BinaryIO = open(jsonl, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise disk.unwritable(csv, error) from error

    def append(self, row: MetricsRow) -> None:
        """Write ``row``; its step must be later than the steps before.

        Raises UsageError for a step or a column that has no place, CheckpointError when the files
        cannot be written.
        """
        if row.step <= self.last_step:
            raise UsageError(
                f"metrics of step {row.step} come after those of step {self.last_step}; append "
                "rows in rising order of steps",
                code="metrics-out-of-order",
            )
        values = row.values()
        unknown = [name for name in values if name not in self._columns]
        if unknown:
            raise UsageError(
                f"metrics {unknown} were not announced; name them in extra",
                code="metrics-out-of-order",
            )
        try:
            _write_whole(self._csv, self._csv_line({n: _to_text(v) for n, v in values.items()}))
            _write_whole(self._jsonl, _to_json(values, row.ranks) + "\n")
        except OSError as error:
            raise disk.unwritable(self._csv.name, error) from error
        self.last_step = row.step
        if self._trackers is not None:
            self._trackers.write(row.step, values)

    def close(self) -> None:
        """Close the files. Warns, instead of failing, where a file server reports lost rows."""
        for close in (self._csv.close, self._jsonl.close):
            try:
                close()
            except OSError as error:
                warnings.warn(f"the metrics may lack their last rows: {error}", stacklevel=1)
        if self._trackers is not None:
            self._trackers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _csv_line(self, texts: Mapping[str, str]) -> str:
        return ",".join(texts.get(name, "") for name in self._columns) + "\n"

    def _csv_text(self, rows: Sequence[Mapping[str, str]]) -> str:
        return ",".join(self._columns) + "\n" + "".join(map(self._csv_line, rows))


def read(run_folder: Path) -> list[MetricsRow]:
    """Read the rows of ``run_folder``; a run without metrics has none."""
    rows = []
    for texts in _read_csv(run_folder / "metrics.csv"):
        values: dict[str, Any] = {
            name: int(text) if name in INTEGERS else float(text)
            for name, text in texts.items()
            if text
        }
        extra = {name: values.pop(name) for name in list(values) if name not in COLUMNS}
        rows.append(MetricsRow(**values, extra=extra))
    return rows


def _write_whole(file: BinaryIO, line: str) -> None:
    """Append ``line`` or nothing: a full disk would keep a part of it. Raises OSError."""
    data, end = line.encode(), file.seek(0, os.SEEK_END)
    if file.write(data) < len(data):
        file.truncate(end)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_names(names: Sequence[str]) -> None:
    """Raise ConfigError for a task's metric that cannot be a column."""
    for name in names:
        if name in _TAKEN or not re.fullmatch(r"[\w.@/ -]+", name):
            raise ConfigError(
                f"metric {name!r} cannot be a column of metrics.csv; use letters, digits, blanks "
                f"and _ . @ / -, and another name than {', '.join(_TAKEN)}",
                code="metrics-invalid",
            )


def _read_lines(path: Path) -> Iterator[str]:
    """Yield the whole lines of ``path``: none where there is no file, not the last half line."""
    if path.exists():
        *whole, _half = regular_file(path).read_text("utf-8", errors="replace").split("\n")
        yield from whole


def _read_csv(path: Path) -> list[dict[str, str]]:
    header, *lines = list(_read_lines(path)) or [""]
    columns = header.split(",")
    rows = [line.split(",") for line in lines]
    return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]


def _parse(line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _wanted(row: Mapping[str, Any], resume_step: int | None) -> bool:
    try:
        step = int(row["step"])
    except (KeyError, TypeError, ValueError):
        return False
    return resume_step is None or step <= resume_step


def _to_text(value: Number) -> str:
    """The shortest text that reads back as the same number."""
    return "" if value is None else repr(value)


def _to_json(values: Mapping[str, Number], ranks: Sequence[RankTimes]) -> str:
    # JSON has no NaN: such a value is null, and exact in the CSV file.
    row: dict[str, Any] = {
        n: v if math.isfinite(v) else None for n, v in values.items() if v is not None
    }
    return json.dumps(row | rank_columns(ranks))
