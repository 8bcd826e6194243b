"""dear-train run --trace under mpirun: traces that load, even of a killed rank, and slow ranks."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import dearmpi
from dearmpi.report.read.trace import merge, read_trace, read_traces, trace_path
from dearmpi.report.read.trace_writer import SLOT_STRIDE
from dearmpi.span import Track
from tests.forks import forked
from tests.job import Ended, run_job

pytestmark = pytest.mark.ranks(1)  # each test starts ranks of its own

ROOT = Path(dearmpi.__file__).parents[1]
LIMIT_S = 90.0  # below the limit of a test, so that a job that hangs is shown

TASK = """
import os
import signal
import time
import torch
from torch import nn

import dearmpi
from dearmpi.train.tasks.task import Task


def make(options):
    last = dearmpi.connect().rank == dearmpi.connect().size - 1
    kill_at, slow_s = int(options.get("kill_at", "0")), float(options.get("slow_s", "0"))
    steps = [0]

    def loss(model, batch):
        steps[0] += model.training
        if last and steps[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if last:
            time.sleep(slow_s)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    data = [(torch.full((64,), i / 64), torch.tensor([i / 64])) for i in range(64)]
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Linear(256, 1))
    return Task("line", model, data, loss, defaults={"max_steps": 12, "batch_size": 16})
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "line.py").write_text(TASK)
    return tmp_path


def launch(folder: Path, *arguments: str) -> Ended:
    command = [sys.executable, "-m", "dearmpi.cli.main", "run", "--task", "line.py:make"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return run_job(
        forked([*command, "--name", "a", "--bucket-cap-mb", "0.1", *arguments]),
        ranks=2,
        limit_s=LIMIT_S,
        folder=folder,
        environment={"PYTHONPATH": paths},
    )


def spans(events: Any) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def test_traces_of_all_ranks_show_each_bucket_on_its_way(folder: Path) -> None:
    ended = launch(folder, "--trace", "3:6")
    assert ended.returncode == 0, ended.output
    traces = read_traces(folder / "runs" / "a")
    assert not traces.notes and [trace.rank for trace in traces.traces] == [0, 1]
    for trace in traces.traces:
        found = {(e["name"], e["args"]["iteration"]): e for e in spans(trace.events)}
        assert {iteration for _, iteration in found} == {3, 4, 5}
        for iteration in (3, 4, 5):
            assert {("F 0", iteration), ("B 0", iteration), ("data", iteration)} <= found.keys()
            for bucket in (0, 1):
                reduced, updated, gathered = (
                    found[f"{name}{bucket}", iteration] for name in ("RS", "U", "AG")
                )
                assert reduced["args"]["first_progress_us"] <= reduced["dur"] + 0.1
                assert reduced["ts"] + reduced["dur"] <= updated["ts"] + 0.01
                assert updated["ts"] + updated["dur"] <= gathered["ts"] + 0.01
        check_nesting(spans(trace.events))
        check_data(spans(trace.events))
    first, second = (
        {(e["name"], e["args"]["iteration"]): e for e in spans(trace.aligned())}
        for trace in traces.traces
    )
    for operation in first.keys() & second.keys():
        if operation[0][:2] in ("RS", "AG"):  # no rank is done before the other has begun
            within_us = traces.traces[1].uncertainty_us + 0.01
            for one, other in ((first, second), (second, first)):
                span, begun = one[operation], other[operation]["ts"]
                assert span["ts"] + span["dur"] >= begun - within_us, operation


def check_nesting(events: list[dict[str, Any]]) -> None:
    """On each track spans lie within one another or apart, else viewers drop them."""
    tracks = defaultdict(list)
    for event in events:
        start_ns, length_ns = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
        tracks[event["tid"]].append((start_ns, -length_ns))
    for track in tracks.values():
        open_until: list[int] = []
        for start, length in sorted(track):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or start - length <= open_until[-1]
            open_until.append(start - length)


def check_data(events: list[dict[str, Any]]) -> None:
    """A wait counts as communication, and not as data too."""
    lanes = [
        [(e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] % SLOT_STRIDE == track]
        for track in (Track.DATA, Track.WAIT)
    ]
    for start, stop in lanes[0]:
        assert all(stop <= begun or ended <= start for begun, ended in lanes[1])


def test_a_rank_killed_while_it_records_leaves_a_trace_that_loads(folder: Path) -> None:
    ended = launch(folder, "--trace", "1:1000", "--task-option", "kill_at=7")
    assert ended.returncode != 0
    for rank in (0, 1):
        trace = read_trace(trace_path(folder / "runs" / "a", rank))
        assert trace is not None
        assert {e["args"]["iteration"] for e in spans(trace.events)} >= {1, 2, 3, 4}
    merged = merge(folder / "runs" / "a")
    assert merged.num_ranks == 2 and spans(json.loads(merged.path.read_text()))


def test_a_slow_rank_is_named_with_its_host(folder: Path) -> None:
    ended = launch(folder, "--task-option", "slow_s=0.05", "--max-steps", "100")
    assert ended.returncode == 0, ended.output
    run = folder / "runs" / "a"
    host = json.loads((run / "env.json").read_text())["hosts"][1]
    assert ended.output.count(f"rank 1 on {host} is slow: busy for 0.") == 1
    assert f"rank 1 on {host} is slow" in (run / "logs" / "rank-00000.log").read_text()
    told = []
    for line in (run / "metrics.jsonl").read_text().splitlines()[1:]:
        row = json.loads(line)
        own = [a - b for a, b in zip(row["rank_step_s"], row["rank_wait_s"], strict=True)]
        waited_s = row["rank_wait_s"]
        told.append(own[1] > 0.05 and own[1] > own[0] and waited_s[0] > waited_s[1])
    assert told.count(True) > len(told) / 2  # a busy machine may hold up rank 0 in a few
