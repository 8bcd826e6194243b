"""Trackers: what each writes with its real package, where that is installed, and how they fail."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

import dearmpi
from dearmpi.errors import ConfigError
from dearmpi.train.metrics import trackers
from dearmpi.train.metrics.metrics import MetricsLog, MetricsRow
from dearmpi.train.metrics.trackers import TrackedRun, Trackers
from dearmpi.train.settings.choices import TrackerName
from tests.codes import raises
from tests.forks import forked
from tests.job import run_job


def write_rows(run: TrackedRun, name: str, *steps: int) -> None:
    with MetricsLog(run.folder, resume_step=run.resume_step, trackers=Trackers([name], run)) as log:
        for step in steps:
            log.append(MetricsRow(step, 1, loss=1.0 / step))


def test_the_setting_names_every_tracker() -> None:
    assert {trackers.CSV, *trackers.TRACKERS} == set(get_args(TrackerName))


def test_csv_is_the_file_that_every_run_has(tmp_path: Path) -> None:
    write_rows(TrackedRun(tmp_path), "csv", 1, 2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["metrics.csv", "metrics.jsonl"]
    header, first, _ = (tmp_path / "metrics.csv").read_text().splitlines()
    assert dict(zip(header.split(","), first.split(","), strict=True))["loss"] == "1.0"


def test_a_resumed_run_goes_on_in_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[Any, ...]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            events.append((folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            events.append((name, value, step))

        def flush(self) -> None:
            pass

        def close(self) -> None:
            events.append(("closed",))

    module = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    found = trackers.TensorBoard(TrackedRun(tmp_path, resume_step=4))
    found.write(5, {"epoch": 1, "loss": 0.5})
    found.close()
    expected = [("epoch", 1, 5), ("loss", 0.5, 5), ("closed",)]
    assert events == [(str(tmp_path / "tensorboard"), 5), *expected]


def test_tensorboard_has_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_rows(TrackedRun(tmp_path), "tensorboard", 2, 4)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(2, 0.5), (4, 0.25)]


def log_records(content: bytes) -> Iterator[bytes]:
    """The records of a short .wandb file: each with its checksum, length and kind before it."""
    place = 7
    while place + 7 <= len(content):
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        assert kind == 1  # in one piece
        yield content[place + 7 : place + 7 + length]
        place += 7 + length


def test_wandb_has_the_numbers_offline_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    run = TrackedRun(tmp_path, {"lr": 0.5})
    write_rows(run, "wandb", 2, 4)
    name = run.stored_id("wandb")
    write_rows(TrackedRun(tmp_path, {"lr": 0.5}, resume_step=2), "wandb", 4)
    assert name is not None and run.stored_id("wandb") == name
    seen = set[tuple[float, float]]()
    for path in tmp_path.glob(f"wandb/offline-run-*-{name}/run-{name}.wandb"):
        for data in log_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.history.item
                }
                seen.add((items["step"], items["loss"]))
    assert seen == {(2, 0.5), (4, 0.25)}


def test_mlflow_has_the_numbers_and_a_resumed_run_is_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = TrackedRun(tmp_path, {"lr": 0.5, "task": "digits"})
    write_rows(run, "mlflow", 2, 4)
    write_rows(TrackedRun(tmp_path, resume_step=4), "mlflow", 6)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    name = run.stored_id("mlflow")
    found = client.get_run(name)
    assert found.data.params == {"lr": "0.5", "task": "digits"}
    assert found.info.status == "FINISHED" and found.info.run_name == tmp_path.name
    history = [(metric.step, metric.value) for metric in client.get_metric_history(name, "loss")]
    assert history == [(2, 0.5), (4, 0.25), (6, 1 / 6)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_refused_with_the_command_that_installs_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with raises(ConfigError, "library-missing", name, f"pip install 'dearmpi[{name}]'"):
        Trackers([name], TrackedRun(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_tracker_is_refused() -> None:
    with raises(ConfigError, "unknown-choice", "wandb"):
        trackers.check_trackers(["wanbd"])


def test_a_tracker_that_fails_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, run: TrackedRun) -> None:
            pass

        def write(self, step: int, values: Mapping[str, float]) -> None:
            raise RuntimeError("no route to host")

        def close(self) -> None:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    kind = trackers._Kind(Failing, "json", "json")
    monkeypatch.setitem(trackers.TRACKERS, "failing", kind)
    with pytest.warns(UserWarning) as told:
        write_rows(TrackedRun(tmp_path), "failing", 1)
    said = [str(one.message) for one in told]
    assert ["of step 1: no route" in said[0], "Disk quota exceeded" in said[1]] == [True, True]
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 2


SCRIPT = """
import sys

import torch

import dearmpi
from dearmpi.train.metrics import trackers


class Printing:
    def __init__(self, run):
        print("tracked", run.folder.name, run.resume_step, flush=True)

    def write(self, step, values):
        print("row", step, values["loss"], flush=True)

    def close(self):
        print("closed", flush=True)


trackers.TRACKERS["printing"] = trackers._Kind(Printing, "json", "json")
world = dearmpi.connect()
model = torch.nn.Linear(1, 1)
inner = torch.optim.SGD(model.parameters(), lr=0.0)
optimizer = dearmpi.DistributedOptimizer(inner, model)
with dearmpi.Run(
    sys.argv[1], model, optimizer, log_interval=1, tracker=["csv", "printing"]
) as run:
    for step in range(2):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(float(world.rank))
"""


def test_rank_0_of_a_script_tracks_the_mean_over_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = run_job(
        forked([sys.executable, script, tmp_path / "a"]),
        ranks=2,
        limit_s=120,
        environment={"PYTHONPATH": str(Path(dearmpi.__file__).parents[1])},
    )
    assert ended.returncode == 0, ended.output
    lines = [line.strip() for line in ended.output.splitlines() if line.strip()]
    assert lines == ["tracked a None", "row 1 0.5", "row 2 0.5", "closed"]
