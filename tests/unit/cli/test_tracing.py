"""dear-train run --trace, and dear-train trace: from a flag to a file for a viewer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dearmpi.cli.endings import rank_log
from dearmpi.cli.main import main
from dearmpi.cli.run_session import run_session
from dearmpi.comm.world import World
from dearmpi.report.read.trace import merge, trace_path
from dearmpi.train.ranks.agreement import AgreedError
from dearmpi.train.ranks.stop import StopRequest
from dearmpi.train.settings.sources import make_source, read_file

TASK = """
import torch
from torch import nn
from dearmpi.train.tasks.task import Task


def make(options):
    data = [(torch.full((3,), i / 20), torch.tensor([i / 20])) for i in range(20)]
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    loss = lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])
    defaults = {"optimizer": "SGD", "lr": 0.25, "max_steps": 8, "batch_size": 4}
    return Task("line", model, data, loss, eval_data=data[:5], defaults=defaults)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "line.py").write_text(TASK)
    return tmp_path


def run(world: World, folder: Path, **given: object) -> Path:
    values = {"task": f"{folder}/line.py:make", "run_folder": str(folder), "name": "a", **given}
    with rank_log(speaks=False) as log, StopRequest() as stop:
        layer = make_source("flag", values)
        assert run_session(world, [layer], stop=stop, log=log, command=["dear-train"]) == 0
    return folder / "a"


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def test_the_iterations_that_were_asked_for_are_recorded(alone: World, folder: Path) -> None:
    path = trace_path(run(alone, folder, trace="3:5", checkpoint_interval="3"), 0)
    found = [(span["name"], span["args"]["iteration"]) for span in spans(path)]
    names = {"F 0", "F 1", "B 0", "B 1", "data", "update"}
    assert {name for name, number in found if number == 3} >= names
    assert {number for _, number in found} == {3, 4}
    assert ("checkpoint", 4) in found  # between iterations 3 and 4


def test_the_same_command_goes_on_after_what_it_has_recorded(
    alone: World, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"trace": "2:4", "resume": "auto"}
    path = trace_path(run(alone, folder, max_steps="6", **given), 0)
    recorded = path.read_bytes()
    assert "nothing is recorded" not in capsys.readouterr().out
    run(alone, folder, max_steps="8", **given)
    told = capsys.readouterr().out
    assert "nothing is recorded: trace is 2:4, but this run takes the iterations 7 to 8" in told
    assert path.read_bytes() == recorded
    with pytest.raises(AgreedError, match="takes the iterations 1 to 8"):
        run(alone, folder, name="b", trace="9:12")


def test_without_the_flag_there_is_no_trace(alone: World, folder: Path) -> None:
    assert not (run(alone, folder) / "trace").exists()


def test_merge_says_what_it_wrote(
    alone: World, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace_of = run(alone, folder, trace="3:5")
    capsys.readouterr()
    assert main(["trace", "merge", str(trace_of), "--out", str(folder / "all.json")]) == 0
    assert f"wrote {folder / 'all.json'}: " in capsys.readouterr().out
    assert len(spans(folder / "all.json")) == len(spans(trace_path(trace_of, 0)))
    assert main(["trace", "merge", str(folder)]) == 2
    assert "dear-train run --trace START:STOP" in capsys.readouterr().err


@pytest.mark.parametrize("window", ["9:12", "20:30"])
def test_iterations_that_the_run_does_not_take_are_refused(
    alone: World, folder: Path, window: str
) -> None:
    with pytest.raises(AgreedError, match=f"trace is {window}, but .* iterations 1 to 8"):
        run(alone, folder, trace=window)
    assert not (folder / "a").exists()


def test_a_resumed_run_records_anew_only_when_asked(alone: World, folder: Path) -> None:
    path = trace_path(run(alone, folder, trace="3:5"), 0)
    before = path.read_text()
    merged = merge(path.parent.parent).path
    run(alone, folder, resume="auto", max_steps="10")
    assert path.read_text() == before and merged.exists()
    run(alone, folder, resume="auto", max_steps="14", trace="12:13")
    assert {span["args"]["iteration"] for span in spans(path)} == {12}
    assert not merged.exists()  # it would be of other iterations than the traces beside it


def test_a_place_where_no_trace_can_be_written_is_told_without_a_traceback(
    alone: World, folder: Path
) -> None:
    (run(alone, folder) / "trace").write_text("no folder")
    with pytest.raises(AgreedError, match=r"^cannot write traces in .*/a/trace: .*Not a directory"):
        run(alone, folder, resume="auto", max_steps="12", trace="10:11")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("5", "must be START:STOP"),
        ("a:b", "must be a whole number"),
        ("5:5", "STOP above START"),
        ("0:5", "START must be at least 1"),
    ],
)
def test_a_wrong_range_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make_source("flag", {"trace": text})


@pytest.mark.parametrize(
    "text", [yaml.safe_dump({"trace": "10:20"}), "trace: [10, 20]", "trace: 10:20"]
)  # for YAML 1.1 a number of base 60
def test_a_range_in_a_file_is_read_back(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert read_file(path).values == {"trace": (10, 20)}
