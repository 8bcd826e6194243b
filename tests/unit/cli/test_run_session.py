"""A whole run in this process: its folder, its words, its refusals."""

from __future__ import annotations

import csv
import json
import math
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from dearmpi.cli import run_session as starting
from dearmpi.cli.endings import rank_log
from dearmpi.cli.run_session import describe_start, run_session
from dearmpi.comm.world import World
from dearmpi.errors import MismatchError
from dearmpi.train import checkpoint
from dearmpi.train.loop import session
from dearmpi.train.loop.session import open_session
from dearmpi.train.metrics import step_times as tally
from dearmpi.train.ranks.agreement import AgreedError
from dearmpi.train.ranks.device import DeviceChoice
from dearmpi.train.ranks.stop import EXIT_PREEMPTED, StopRequest
from dearmpi.train.settings.sources import make_source
from dearmpi.train.tasks.task import Task
from dearmpi.train.tasks.task_registry import build_task
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks

TASK = """
import signal

import torch
from torch import nn

from dearmpi.train.tasks.task import Task


def make(options):
    count = int(options.get("count", "20"))
    width = int(options.get("width", "4"))
    stop_at = int(options.get("stop_at", "-1"))
    data = [(torch.full((3,), i / count), torch.tensor([i / count])) for i in range(count)]
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1))
    seen = [0]

    def loss(model, batch):
        seen[0] += model.training
        if seen[0] == stop_at:
            signal.raise_signal(signal.SIGUSR1)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    return Task(
        "line",
        model,
        data,
        loss,
        eval_data=data[:5] if options.get("eval") != "no" else None,
        unit="points",
        units_per_sample=2,
        loss_scale_name="percent",
        loss_scale=100.0,
        notes=["a note of the task"],
        summarize=lambda model: ["a closing line"],
        defaults={"optimizer": "SGD", "lr": 0.25, "max_steps": 6, "batch_size": 4},
    )
"""


@pytest.fixture
def task_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Python would take what it compiled for the text of the same second and length.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "line.py"
    path.write_text(TASK)
    return path


def run(world: World, task_file: Path, **given: object) -> int:
    values = {"task": f"{task_file}:make", "run_folder": str(task_file.parent / "runs"), **given}
    with rank_log(speaks=True) as log, StopRequest() as stop:
        source = make_source("flag", values)
        return run_session(world, [source], stop=stop, log=log, command=["dear-train", "run"])


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_fills_its_folder(alone: World, task_file: Path) -> None:
    assert run(alone, task_file, name="a", log_interval="2") == 0
    folder = task_file.parent / "runs" / "a"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["lr"] == 0.25 and config["max_steps"] == 6 and config["log_interval"] == 2
    environment = json.loads((folder / "env.json").read_text())
    assert environment["world_size"] == 1 and environment["command"] == ["dear-train", "run"]
    with open(folder / "metrics.csv") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["2", "4", "5", "6"]
    assert "rank 0 of 1" in (folder / "logs" / "rank-00000.log").read_text()
    assert (folder / "latest").read_text() == "checkpoints/step-00000006\n"


def test_the_console_tells_the_story(
    alone: World, task_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(alone, task_file, name="a", log_interval="3")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("line on 1 rank")
    assert lines[1].startswith("tensors on ")  # also of a host, on which a GPU may lie idle
    assert "a note of the task" in lines
    (third,) = [line for line in lines if line.startswith("step 3/6")]
    assert "percent " in third and "lr 0.25" in third and "points/s" in third
    summary = lines[[line.startswith("done at step 6 of 6") for line in lines].index(True) :]
    assert "percent in training: " in summary[1] and " -> " in summary[1]
    assert summary[2].startswith("percent on 5 held-out samples: ")
    assert summary[-2:] == [f"run folder: {task_file.parent / 'runs' / 'a'}", "a closing line"]


def test_ranks_that_share_a_device_are_told_of_on_the_console(
    alone: World,
    task_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice = DeviceChoice(torch.device("cpu"), "as asked", ("warning: ranks on n0: 2",))
    monkeypatch.setattr(session, "choose_device", lambda world, asked: choice)
    run(alone, task_file, name="a")
    assert "warning: ranks on n0: 2" in capsys.readouterr().out.splitlines()


def test_a_batch_larger_than_the_data_and_a_single_row_are_told_as_they_are(
    alone: World, task_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(alone, task_file, name="a", batch_size="64", max_steps="2", eval_interval="0")
    told = capsys.readouterr().out
    assert "length: 2 steps of 20 samples, all that there are, for a batch size of 64 (2.00" in told
    assert "percent in training: " in told and " -> " not in told


def same_state(first: Path, second: Path) -> bool:
    """Whether two checkpoints hold the same model, bit for bit."""
    left, right = checkpoint.load(first).model, checkpoint.load(second).model
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def test_a_run_whose_time_is_up_says_so_and_how_to_go_on(
    alone: World, task_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(alone, task_file, name="a", max_time_s="1e-6") == EXIT_PREEMPTED
    told = capsys.readouterr().out
    assert "stopped as asked at step " in told
    place = f"--run-folder {task_file.parent / 'runs'} --name a"
    assert f"stopped by --max-time 1e-06 s; the same command with {place} --resume auto" in told


def test_a_written_config_is_a_config_file_for_the_same_run(alone: World, task_file: Path) -> None:
    run(alone, task_file, name="a")
    runs = task_file.parent / "runs"
    config = yaml.safe_load((runs / "a" / "config.yaml").read_text())
    with rank_log(speaks=False) as log, StopRequest() as stop:
        sources = [make_source("flag", {"name": "b"}), make_source("file", config, origin="f")]
        run_session(alone, sources, stop=stop, log=log, command=[])
    a, b = (runs / name / "checkpoints" / "step-00000006" for name in "ab")
    assert same_state(a, b)


def test_a_signal_ends_the_run_with_a_checkpoint_and_resume_goes_on(
    alone: World,
    task_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tally, "LONG_STEP_S", math.inf)  # also where something holds a step up
    assert run(alone, task_file, name="whole") == 0
    assert run(alone, task_file, name="a", task_options=["stop_at=3"]) == EXIT_PREEMPTED
    runs = task_file.parent / "runs"
    assert (runs / "a" / "latest").read_text() == "checkpoints/step-00000004\n"
    assert "stopped as asked at step 4 of 6" in capsys.readouterr().out
    assert run(alone, task_file, name="a", resume="auto") == 0
    assert "resumed at step 4\n" in capsys.readouterr().out
    whole, resumed = (runs / n / "checkpoints" / "step-00000006" for n in ("whole", "a"))
    assert same_state(whole, resumed)
    assert run(alone, task_file, name="a", resume="auto", max_steps=2) == 0  # as if it were 2 more
    said = "resumed at step 6: nothing is left to train; .*more than the 6 steps that it has"
    assert re.search(said, capsys.readouterr().out)


def test_a_run_that_ended_early_is_left_as_it_is_until_its_patience_is_raised(
    alone: World, task_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worse = {"eval_interval": 1, "patience": 2, "lr": 1e-30}  # which no evaluation shows
    assert run(alone, task_file, name="a", **worse) == 0
    said = "ended early, after 2 evaluations without a lower"
    assert said in capsys.readouterr().out
    kept = files(task_file.parent / "runs" / "a" / "checkpoints")
    assert run(alone, task_file, name="a", resume="auto") == 0
    output = capsys.readouterr().out
    assert "resumed at step 3: nothing is left to train" in output and output.count(said) == 2
    assert "--patience more than 2" in output
    assert files(task_file.parent / "runs" / "a" / "checkpoints") == kept
    assert run(alone, task_file, name="a", resume="auto", patience=9) == 0
    assert "done at step 6 of 6" in capsys.readouterr().out


def test_a_resumed_run_keeps_its_settings_unless_told_otherwise(
    alone: World, task_file: Path
) -> None:
    run(alone, task_file, name="a", lr="0.125", log_interval="2")
    run(alone, task_file, name="a", resume="auto", epochs="2")
    folder = task_file.parent / "runs" / "a"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["lr"], config["log_interval"], config["epochs"]) == (0.125, 2, 2)
    assert "max_steps" not in config
    with open(folder / "metrics.csv") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["2", "4", "5", "6", "8", "10"]


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        ({"optimizer": "adm"}, 2, "unknown optimizer 'adm'"),
        ({"momentum": "0.9", "optimizer": "Adam"}, 2, "momentum has no effect"),
        ({"optimizer": "SGD", "lr": "0.1", "no_decay": "norms"}, 2, "give --weight-decay"),
        ({"lr_schedule": "nowhere.py:curve"}, 2, "lr-schedule nowhere.py:curve"),
        ({"task": "digitz"}, 2, "did you mean 'digits'"),
        ({"task_options": ["eval=no"], "eval_interval": "3"}, 2, "eval_interval 3 has no effect"),
        ({"task_options": ["widht=3"]}, 2, "widht"),
        ({"task": "bytes-lm", "data": "/no/such/text"}, 5, "/no/such/text"),
        ({"batch_size": "2", "gradient_accumulation_steps": "3"}, 2, "need at least 3"),
        ({"shards": "whole", "compress": "topk"}, 2, "shards"),
        ({"name": "not/a/name"}, 2, "no folder name"),
        ({"resume": "auto"}, 2, "needs --name"),
        ({"run_folder": "a" * 300}, 2, "cannot be used as a run folder: File name too long"),
        ({"resume": "a" * 300, "name": "b"}, 6, "aaa: File name too long"),
        ({"task": "bytes-lm", "data": "a" * 300}, 5, "cannot look at "),
    ],
)
def test_what_is_refused_leaves_nothing_behind(
    alone: World, task_file: Path, given: dict[str, object], code: int, message: str
) -> None:
    with pytest.raises(AgreedError) as caught:
        run(alone, task_file, **given)
    assert caught.value.exit_code == code
    assert message in str(caught.value)
    assert not (task_file.parent / "runs").exists()


def test_a_metric_that_can_be_no_column_is_refused_before_there_is_a_folder(
    alone: World, task_file: Path
) -> None:
    """Else the run could not be started again under its name, once the metric has another."""
    metrics = '        metrics=lambda model, batch: {"top-1 (%)": 1.0},\n        unit='
    task_file.write_text(TASK.replace("        unit=", metrics))
    with pytest.raises(AgreedError, match=r"metric 'top-1 \(%\)' cannot be a column"):
        run(alone, task_file, name="a")
    assert not (task_file.parent / "runs").exists()


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        ({"batch_size": "5"}, 2, "batch_size is 5, but the run to resume has 4"),
        ({"seed": "5"}, 2, "seed is 5, but the run to resume has 0"),
        ({"task_options": ["count=30"]}, 2, "task_options"),
        ({"task": "digits"}, 2, "task is 'digits', but the run to resume has "),
    ],
)
def test_a_run_is_resumed_with_what_it_was_begun_or_left_as_it_is(
    alone: World, task_file: Path, given: dict[str, object], code: int, message: str
) -> None:
    run(alone, task_file, name="a", task_options=["eval=yes"])
    before = files(task_file.parent / "runs")
    with pytest.raises(AgreedError) as caught:
        run(alone, task_file, name="a", resume="auto", **given)
    assert caught.value.exit_code == code
    assert message in str(caught.value)
    assert files(task_file.parent / "runs") == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [("flip", "is corrupted"), ("truncate", "is truncated"), ("model", "another model")],
)
def test_a_damaged_or_foreign_checkpoint_is_refused_and_left_as_it_is(
    alone: World, task_file: Path, damage: str, message: str
) -> None:
    run(alone, task_file, name="a")
    found = task_file.parent / "runs" / "a" / "checkpoints" / "step-00000006"
    tensors = found / "part-00000.safetensors"
    content = bytearray(tensors.read_bytes())
    if damage == "flip":
        content[-1] ^= 1
        tensors.write_bytes(content)
    elif damage == "truncate":
        tensors.write_bytes(content[:-1])
    else:
        task_file.write_text(TASK.replace('"width", "4"', '"width", "5"'))
    before = files(task_file.parent / "runs")
    with pytest.raises(AgreedError, match=message) as caught:
        run(alone, task_file, resume=str(found), max_steps="9")
    assert caught.value.exit_code == 6
    assert files(task_file.parent / "runs") == before


def test_other_data_are_noticed_at_resume(alone: World, task_file: Path) -> None:
    run(alone, task_file, name="a")
    task_file.write_text(TASK.replace('"count", "20"', '"count", "24"'))
    with pytest.raises(AgreedError, match="written with 20 training samples, this run has 24"):
        run(alone, task_file, name="a", resume="auto", max_steps="9")


ANOTHER_RUN = """
    (folder / "checkpoints" / ".writing-step-00000006").mkdir(parents=True)
    (folder / "in-use-by").write_text("process 7 on n1")
"""


@pytest.mark.parametrize(("meanwhile", "told"), [("", "was removed"), (ANOTHER_RUN, "process 7")])
def test_a_run_whose_folder_is_gone_or_taken_over_ends_and_writes_nothing_there(
    alone: World, task_file: Path, meanwhile: str, told: str
) -> None:
    folder = task_file.parent / "runs" / "a"
    away = f"""
def take_away():
    import shutil
    from pathlib import Path
    folder = Path({str(folder)!r})
    shutil.rmtree(folder){meanwhile}
"""
    text = TASK.replace("signal.raise_signal(signal.SIGUSR1)", "take_away()")
    task_file.write_text(text + away)
    with pytest.raises(AgreedError, match=told) as caught:
        run(alone, task_file, name="a", task_options=["stop_at=3"])
    assert caught.value.exit_code == 6
    left = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    others = ["checkpoints", "checkpoints/.writing-step-00000006", "in-use-by"]
    assert sorted(left) == (others if meanwhile else [])


def test_a_run_whose_working_folder_is_gone_ends_like_one_whose_folder_is(
    alone: World, task_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run folder is below it unless it is named otherwise."""
    working = tmp_path / "working"
    working.mkdir()
    away = f"import shutil; shutil.rmtree({str(working)!r})"
    task_file.write_text(TASK.replace("signal.raise_signal(signal.SIGUSR1)", away))
    monkeypatch.chdir(working)
    with pytest.raises(AgreedError, match="cannot save in runs/a: .* was removed") as caught:
        run(alone, task_file, name="a", run_folder="runs", task_options=["stop_at=3"])
    assert caught.value.exit_code == 6


def test_a_task_that_changes_the_working_folder_is_refused_where_the_run_would_be_another(
    alone: World, task_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was looked for before the task was built."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    body = "def make(options):\n"
    task_file.write_text(TASK.replace(body, f"{body}    import os; os.chdir({str(elsewhere)!r})\n"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        AgreedError, match=f"folder from {tmp_path} to {elsewhere}.*absolute --run-folder"
    ):
        run(alone, task_file, name="a", run_folder="runs")
    assert not list(elsewhere.iterdir()) and not (tmp_path / "runs").exists()
    monkeypatch.chdir(tmp_path)
    assert run(alone, task_file, name="a") == 0  # in a folder that is given as an absolute path


def test_ranks_with_other_arguments_learn_both_values(task_file: Path) -> None:
    def work(world: World) -> str:
        lr = "0.1" if world.rank == 0 else "0.2"
        source = make_source("flag", {"task": f"{task_file}:make", "lr": lr})
        with pytest.raises(MismatchError) as caught:
            open_session(world, [source])
        return str(caught.value)

    for told in run_ranks(2, work):
        assert "argument lr differs: 0.1 on rank 0" in told and "0.2 on rank 1" in told
    assert not (task_file.parent / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"topology": "2x2"}, "ring, topology 2x2, 2 buckets"),
        ({"topology": "hosts"}, "topology hosts is 2x2, "),
        (
            {"topology": "auto"},
            r"topology auto is (2x2|flat) \(measured: .* ms by 2x2, and .* ms flat\), ",
        ),
        ({"topology": "flat"}, "ring, 2 buckets, progress"),
        ({"compress": "int8"}, "2 buckets, compress int8 of 0 of them, since none has 65,536 "),
        ({"compress": "int8", "least": 1}, "2 buckets, compress int8 of 2 of them, progress"),
    ],
)
def test_the_start_names_the_grid_and_the_codec_in_use(
    settings: dict[str, Any], told: str, task_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(spec: str, options: Mapping[str, str]) -> Task:
        task = build_task(spec, options)
        for param in task.model.parameters():  # ranks of one process share what draws them
            nn.init.ones_(param)
        return task

    monkeypatch.setattr(session, "build_task", build)
    given = dict(settings)
    if "least" in given:
        monkeypatch.setattr(starting, "LEAST_COMPRESSED", given.pop("least"))

    def work(world: World) -> str:
        values = {"task": f"{task_file}:make", "progress": "poll", **given}
        opened = open_session(world, [make_source("flag", values)])
        lines = describe_start(opened.job, opened.threads, opened.device, task_file)
        opened.job.optimizer.close()
        return next(line for line in lines if line.startswith("communication: "))

    lines = run_ranks(4, work, hub=FakeHub(4, hosts=list("aabb")))
    assert len(set(lines)) == 1 and re.search(told, lines[0])


def test_ranks_with_more_samples_than_others_are_told_how_many(
    task_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a file is missing on one host."""
    own = threading.local()

    def build(spec: str, options: Mapping[str, str]) -> Task:
        return build_task(spec, {**options, "count": str(20 + own.rank)})

    monkeypatch.setattr(session, "build_task", build)

    def work(world: World) -> str:
        own.rank = world.rank
        with pytest.raises(MismatchError) as caught:
            open_session(world, [make_source("flag", {"task": f"{task_file}:make"})])
        return str(caught.value)

    for told in run_ranks(2, work):
        assert "data samples differs: 20 and 5 held out on rank 0" in told
        assert "21 and 5 held out on rank 1" in told and "same files" in told


def test_a_run_that_was_given_its_rate_as_an_option_goes_on(alone: World, task_file: Path) -> None:
    given = {"name": "a", "resume": "auto", "optimizer_options": ["lr=0.1", "momentum=0.5"]}
    assert run(alone, task_file, **given) == 0
    assert run(alone, task_file, **given, max_steps="9") == 0
    assert run(alone, task_file, name="a", resume="auto", max_steps="12") == 0
    config = yaml.safe_load((task_file.parent / "runs" / "a" / "config.yaml").read_text())
    assert (config["lr"], config["momentum"]) == (0.1, 0.5)
    assert "optimizer_options" not in config


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without devices")
def test_a_run_that_was_begun_on_devices_goes_on_without(alone: World, task_file: Path) -> None:
    """Nobody gives the settings that have no effect here, so nobody could leave them out."""
    run(alone, task_file, name="a")
    begun = checkpoint.load(task_file.parent / "runs" / "a" / "checkpoints" / "step-00000006")
    of_devices = {"cuda_buffers": "direct", "update_on": "host"}
    begun.meta["config"] |= of_devices
    checkpoint.save(task_file.parent / "runs" / "b", begun)
    assert run(alone, task_file, name="b", resume="auto", max_steps="9") == 0
    for name, value in of_devices.items():
        with pytest.raises(AgreedError, match=f"{name} is '{value}', but the parameters are on"):
            run(alone, task_file, name="b", resume="auto", max_steps="12", **{name: value})
