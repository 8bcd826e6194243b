"""What a run says while it goes on: lines, the live line, and which rank is slow."""

from __future__ import annotations

import io
import logging
import shlex
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dearmpi.cli.console import Console
from dearmpi.cli.console_listener import ConsoleListener, describe_outcome, describe_stop
from dearmpi.report.read.pace import STEADY, STRETCH_STEPS
from dearmpi.train.loop.evaluation import BestEvaluation, Evaluation, Outcome
from dearmpi.train.loop.job import Job
from dearmpi.train.metrics.metrics import MetricsRow
from dearmpi.train.metrics.step_times import RankTimes
from dearmpi.train.settings.settings import RunSettings

TASK = SimpleNamespace(loss_scale_name="percent", loss_scale=100.0, unit="points")
JOB = SimpleNamespace(
    world=SimpleNamespace(size=2, hosts=("n0", "n1"), is_root=True),
    task=TASK,
    start_step=0,
    total_steps=10,
    units=lambda num_samples: 2 * num_samples,
    best=BestEvaluation(),
    batches=SimpleNamespace(shares=SimpleNamespace(weights=())),
    local=None,
    optimizer=SimpleNamespace(codec_choice=None),
)

OUTCOME = Outcome(
    step=10,
    stopped=False,
    first_loss=0.5,
    last_loss=0.25,
    evaluation=Evaluation(0.125, 7, {"ones": 1.0}),
    train_s=20.0,
    elapsed_s=20.0,
    samples_per_s=5.0,
    hidden_share=0.75,
    num_skipped=0,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_narrator(out: io.StringIO, *, speaks: bool = True) -> ConsoleListener:
    return ConsoleListener(cast(Job, JOB), Console(speaks=speaks, out=out), None)


def make_row(step: int, **changes: Any) -> MetricsRow:
    values = {"samples_per_s": 100.0, "step_s": 2.0, "exposed_s": 0.5, "communication_s": 1.0}
    return MetricsRow(step, 0, loss=1.5, **{**values, **changes})


def test_a_line_tells_throughput_what_is_hidden_and_how_long_it_goes_on() -> None:
    out = io.StringIO()
    listener = make_narrator(out)
    listener.stepped(4)
    listener.measured(make_row(4))
    listener.measured(make_row(10))
    assert out.getvalue().splitlines() == [
        "step 4/10  percent 150.0000  200 points/s  exposed 25%  hidden 50%  12 s left",
        "step 10/10  percent 150.0000  200 points/s  exposed 25%  hidden 50%",
    ]


def test_in_a_terminal_the_live_line_moves_with_every_step() -> None:
    out = Terminal()
    listener = make_narrator(out)
    listener.measured(make_row(4))
    assert out.getvalue() == ""
    listener.stepped(5)
    assert out.getvalue().endswith(" 5/10  10 s left  percent 150.0000  hidden 50%  200 points/s")


def test_a_line_tells_what_an_evaluation_found() -> None:
    out = io.StringIO()
    row = make_row(10, eval_loss=0.5, extra={"ones": 1.0}, learning_rate=0.25)
    make_narrator(out).measured(row)
    told = "held out 50.0000  ones 1.0000  lr 0.25  200 points/s  exposed 25%  hidden 50%"
    assert out.getvalue() == f"step 10/10  percent 150.0000  {told}\n"


def test_the_time_that_is_left_includes_what_is_done_between_steps() -> None:
    out = io.StringIO()
    listener = make_narrator(out)
    for step, elapsed_s in ((2, 9.0), (4, 13.0), (6, 33.0)):  # steps of 2 s, and 16 s once in four
        listener.measured(make_row(step, elapsed_s=elapsed_s))
    assert [line.rpartition("  ")[2] for line in out.getvalue().splitlines()] == [
        "16 s left",
        "12 s left",
        "24 s left",
    ]


@pytest.mark.parametrize(
    ("elapsed_s", "told"),
    [(20.5, "20 s, 10"), (80.0, "20 s (1 min 20 s with checkpoints and evaluations), 10")],
)
def test_the_summary_tells_the_whole_time_where_it_is_another(elapsed_s: float, told: str) -> None:
    line, *_ = describe_outcome(cast(Job, JOB), replace(OUTCOME, elapsed_s=elapsed_s), Path("run"))
    assert line == f"done at step 10 of 10: 10 steps in {told} points/s"


def test_the_summary_is_in_the_units_of_the_task() -> None:
    assert describe_outcome(cast(Job, JOB), OUTCOME, Path("run")) == [
        "done at step 10 of 10: 10 steps in 20 s, 10 points/s",
        "percent in training: 50.0000 -> 25.0000",
        "percent on 7 held-out samples: 12.5000, ones 1.0000",
        "communication: 75% hidden behind computation",
        "run folder: run",
    ]


def test_ranks_that_do_not_speak_are_silent() -> None:
    out = Terminal()
    listener = make_narrator(out, speaks=False)
    listener.stepped(4)
    listener.measured(make_row(4, eval_loss=1.0, ranks=(RankTimes(2, 0), RankTimes(2, 1.5))))
    assert out.getvalue() == ""


def test_a_slow_rank_is_named_once_with_its_host_and_again_after_it_recovered() -> None:
    slow, even = (RankTimes(2, 1.5), RankTimes(2, 0)), (RankTimes(2, 0), RankTimes(2, 0))
    out = io.StringIO()
    listener = make_narrator(out)
    phases = (slow, STEADY), (even, 1), (slow, STEADY), (even, STEADY), (slow, STEADY)
    rows = [ranks for ranks, count in phases for _ in range(count)]
    for row, ranks in enumerate(rows, 1):
        listener.measured(make_row(row * STRETCH_STEPS, ranks=ranks))
    lines = [line for line in out.getvalue().splitlines() if "slow" in line]
    assert len(lines) == 2
    assert lines[0].startswith("rank 1 on n1 is slow: busy for 2 s per step, the other ranks for")
    assert "0.5 s, and they wait 1.5 s for it" in lines[0]


def test_what_compress_auto_takes_is_said_once() -> None:
    out = io.StringIO()
    optimizer = SimpleNamespace(codec_choice=None)
    job = SimpleNamespace(**{**vars(JOB), "optimizer": optimizer})
    listener = ConsoleListener(cast(Job, job), Console(speaks=True, out=out), None)
    listener.stepped(1)
    optimizer.codec_choice = "compress: int8"
    listener.stepped(2)
    listener.stepped(3)
    assert out.getvalue().count("compress: int8") == 1


def test_the_ranks_of_a_slow_host_are_named_in_one_line() -> None:
    out = io.StringIO()
    world = SimpleNamespace(size=4, hosts=("n0", "n0", "n1", "n1"), is_root=True)
    job = SimpleNamespace(**{**vars(JOB), "world": world})
    listener = ConsoleListener(cast(Job, job), Console(speaks=True, out=out), None)
    for row in range(1, 3 * STEADY):
        late = [0.01 * (row % 2), 0.01 * (row % 3)]  # now the one is slowest, now the other
        waits_s = (1.5, 1.5, *late)
        ranks = tuple(RankTimes(2, wait_s) for wait_s in waits_s)
        listener.measured(make_row(row * STRETCH_STEPS, ranks=ranks))
    (line,) = [line for line in out.getvalue().splitlines() if "slow" in line]
    assert line.startswith("ranks 2 and 3 on n1 are slow: busy for 1.9")


@pytest.mark.parametrize("is_root", [True, False])
def test_a_slow_rank_stands_in_the_log_of_rank_0_alone(
    caplog: pytest.LogCaptureFixture, is_root: bool
) -> None:
    world = SimpleNamespace(size=2, hosts=("n0", "n1"), is_root=is_root)
    job = SimpleNamespace(**{**vars(JOB), "world": world})
    # Also where rank 0 has no standard output.
    listener = ConsoleListener(cast(Job, job), Console(speaks=is_root, out=None), None)
    with caplog.at_level(logging.INFO, "dearmpi"):
        for row in range(1, STEADY + 1):
            slow = RankTimes(2, 1.5), RankTimes(2, 0)
            listener.measured(make_row(row * STRETCH_STEPS, ranks=slow))
    lines = [line for line in caplog.messages if "rank 1 on n1 is slow" in line]
    assert len(lines) == is_root


def test_the_command_to_go_on_with_can_be_pasted() -> None:
    weeks = describe_stop(None, 14 * 86400.0, folder=Path("runs/a"))
    assert weeks.startswith("stopped by --max-time 1209600 s; ")
    told = describe_stop(signal.SIGTERM, None, folder=Path("my runs/it's mine"))
    words = shlex.split(told.partition(" with ")[2])
    assert words[:4] == ["--run-folder", "my runs", "--name", "it's mine"]


def test_the_chosen_time_between_checkpoints_is_told_with_its_reason() -> None:
    out = io.StringIO()
    narrator = make_narrator(out)
    narrator.job = cast(
        Job,
        SimpleNamespace(
            world=JOB.world, settings=RunSettings(checkpoint_interval="auto", mtbf_hours=10)
        ),
    )
    narrator.chose_interval(1359.0, 50.0)
    assert out.getvalue() == (
        "checkpoints every 22 min 39 s from here on: one stops training for 50 s, and 2 rank(s) "
        "fail every 5 h 0 min\n"
    )
