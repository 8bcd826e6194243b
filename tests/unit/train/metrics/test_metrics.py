"""Metrics: whole rows, each step once, however the run before ended."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path

import pytest

from dearmpi.errors import CheckpointError, ConfigError, UsageError
from dearmpi.train.metrics import metrics
from dearmpi.train.metrics.metrics import MetricsLog, MetricsRow
from tests.codes import raises


def write(folder: Path, *steps: int, resume_step: int | None = None, loss: float = 1.0) -> None:
    with MetricsLog(folder, resume_step=resume_step) as log:
        for step in steps:
            log.append(MetricsRow(step, epoch=0, loss=loss))


def steps_of(folder: Path) -> tuple[list[int], list[int]]:
    """Steps in the CSV file and in the JSONL file, each read strictly."""
    header, *lines = (folder / "metrics.csv").read_text().splitlines()
    assert {line.count(",") for line in lines} <= {header.count(",")}
    jsonl = (folder / "metrics.jsonl").read_text().splitlines()
    return [int(line.split(",")[0]) for line in lines], [json.loads(line)["step"] for line in jsonl]


def test_rows_come_back_exactly(tmp_path: Path) -> None:
    rows = [
        MetricsRow(1, 0, loss=0.1 + 0.2, learning_rate=1e-5, samples_per_s=1234.5, step_s=0.25),
        MetricsRow(2, 0, loss=math.inf, exposed_s=0.0, communication_s=1 / 3, elapsed_s=9.0),
        MetricsRow(
            3, 1, loss=2.5, eval_loss=7.0, grad_norm=4.0, fallbacks=7, extra={"accuracy": 0.97}
        ),
    ]
    with MetricsLog(tmp_path, extra=["accuracy"]) as log:
        for row in rows:
            log.append(row)
    assert metrics.read(tmp_path) == rows
    first, second, third = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first == {
        "step": 1,
        "epoch": 0,
        "loss": 0.1 + 0.2,
        "learning_rate": 1e-5,
        "samples_per_s": 1234.5,
        "step_s": 0.25,
    }
    assert second["loss"] is None  # JSON has no infinity
    assert third["accuracy"] == 0.97


def test_a_run_without_metrics_has_no_rows(tmp_path: Path) -> None:
    assert metrics.read(tmp_path) == []
    MetricsLog(tmp_path).close()
    assert metrics.read(tmp_path) == []


def test_each_row_is_on_the_disk_before_the_next(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        log.append(MetricsRow(step, 0))
        assert steps_of(tmp_path) == ([*range(1, step + 1)], [*range(1, step + 1)])
    log.close()


@pytest.mark.parametrize("name", ["metrics.csv", "metrics.jsonl"])
def test_a_half_line_of_a_killed_writer_is_cut(tmp_path: Path, name: str) -> None:
    write(tmp_path, 1, 2, 3)
    path = tmp_path / name
    last = len(path.read_text().splitlines()[-1]) + 1
    # Wherever the kill fell within the last line, its half does not count.
    for cut in range(1, last):
        path.write_text(path.read_text()[:-cut])
        if name == "metrics.csv":
            assert [row.step for row in metrics.read(tmp_path)] == [1, 2]
        write(tmp_path, 4, resume_step=3)
        assert steps_of(tmp_path)[name == "metrics.jsonl"] == [1, 2, 4]
        write(tmp_path, 3, resume_step=2)


def test_rows_after_the_resumed_step_are_written_anew(tmp_path: Path) -> None:
    write(tmp_path, 10, 20, 30, 40)
    write(tmp_path, 30, 40, 50, resume_step=25, loss=2.0)
    assert steps_of(tmp_path) == ([10, 20, 30, 40, 50], [10, 20, 30, 40, 50])
    assert [row.loss for row in metrics.read(tmp_path)] == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert (tmp_path / "metrics.csv").read_text().count("step,") == 1


def test_a_resumed_run_may_have_other_metrics(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, extra=["accuracy"]) as log:
        log.append(MetricsRow(1, 0, extra={"accuracy": 0.5}))
    with MetricsLog(tmp_path, extra=["top 5"], resume_step=1) as log:
        log.append(MetricsRow(2, 0, extra={"top 5": 0.75}))
    assert [row.extra for row in metrics.read(tmp_path)] == [{"accuracy": 0.5}, {"top 5": 0.75}]


def test_garbage_after_a_power_failure_is_dropped(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    for name in ("metrics.csv", "metrics.jsonl"):
        with open(tmp_path / name, "ab") as file:
            file.write(b"\0\0\xff\n[]\n3")
    write(tmp_path, 3, resume_step=2)
    assert steps_of(tmp_path) == ([1, 2, 3], [1, 2, 3])


def test_no_step_is_written_twice(tmp_path: Path) -> None:
    write(tmp_path, 5)
    with MetricsLog(tmp_path, resume_step=5) as log:
        with raises(UsageError, "metrics-out-of-order", 5):
            log.append(MetricsRow(5, 0))
        with raises(UsageError, "metrics-out-of-order", "['accuracy']"):
            log.append(MetricsRow(6, 0, extra={"accuracy": 1.0}))
    assert steps_of(tmp_path) == ([5], [5])


@pytest.mark.parametrize("name", ["a,b", "step", "extra", 'say "x"', "two\nlines", ""])
def test_a_name_that_is_no_column_is_refused(tmp_path: Path, name: str) -> None:
    with raises(ConfigError, "metrics-invalid"):
        MetricsLog(tmp_path, extra=[name])


@pytest.mark.parametrize(("room", "code"), [(0, "cannot-write"), (7, "disk-full")])
def test_a_row_that_a_full_disk_takes_a_part_of_is_an_error_and_leaves_no_half(
    tmp_path: Path, room: int, code: str
) -> None:
    write(tmp_path, 1, 2)
    with MetricsLog(tmp_path, resume_step=2) as log:
        limit = (tmp_path / "metrics.csv").stat().st_size + room
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # as a disk with so much left
        try:
            with raises(CheckpointError, code, "metrics.csv"):
                log.append(MetricsRow(3, 0, loss=1.0))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert steps_of(tmp_path) == ([1, 2], [1, 2])


def test_metrics_that_may_not_be_read_are_told_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").mkdir()
    with raises(CheckpointError, "cannot-write", tmp_path):
        MetricsLog(tmp_path, resume_step=1)
