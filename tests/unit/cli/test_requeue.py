"""dear-train requeue, with stand-ins for SLURM's commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dearmpi.cli.main import main
from dearmpi.cli.requeue import EXIT_PREEMPTED, WarningSignals
from dearmpi.train.ranks import stop
from tests.stand_in import stand_in

VARIABLES = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inside job 17: ``squeue`` prints the file state, and ``scontrol`` notes its arguments."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    stand_in(tmp_path / "bin" / "squeue", f"cat {tmp_path}/state")
    stand_in(tmp_path / "bin" / "scontrol", f'echo "$*" >> {tmp_path}/told')
    (tmp_path / "state").write_text("17 17 RUNNING None\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def requeued(slurm: Path) -> str:
    told = slurm / "told"
    return told.read_text() if told.exists() else ""


def test_the_code_is_that_of_a_run_that_stops_with_a_checkpoint() -> None:
    assert EXIT_PREEMPTED == stop.EXIT_PREEMPTED


def test_a_command_that_stopped_with_a_checkpoint_is_queued_again(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["requeue", "sh", "-c", "exit 75"]) == 75
    assert requeued(slurm) == "requeue 17\n"
    assert "job 17 is queued again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 6", 6), ("kill -9 $$", 137), ("kill -TERM $$", 143)],
)
def test_a_command_that_ended_otherwise_is_not(slurm: Path, script: str, code: int) -> None:
    assert main(["requeue", "sh", "-c", script]) == code
    assert requeued(slurm) == ""


@pytest.mark.parametrize(
    ("state", "again"),
    [("RUNNING None", True), ("COMPLETING TimeLimit", True), ("COMPLETING None", False)],
)
def test_a_job_that_is_being_cancelled_stays_out_of_the_queue(
    slurm: Path, capsys: pytest.CaptureFixture[str], state: str, again: bool
) -> None:
    (slurm / "state").write_text(f"17 17 {state}\n")
    assert main(["requeue", "sh", "-c", "exit 75"]) == 75
    assert bool(requeued(slurm)) == again
    assert ("not queued again; put it back with" in capsys.readouterr().err) != again


def test_one_job_of_an_array_is_queued_again_not_the_array(slurm: Path) -> None:
    # The last of an array has the array's number, for which squeue prints all that are left.
    (slurm / "state").write_text("21 17_9 RUNNING None\n17 17_10 RUNNING None\n")
    assert main(["requeue", "sh", "-c", "exit 75"]) == 75
    assert requeued(slurm) == "requeue 17_10\n"


def test_a_job_that_an_array_has_submitted_is_queued_again_not_the_one_it_comes_from(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "15")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert main(["requeue", "sh", "-c", "exit 75"]) == 75
    assert requeued(slurm) == "requeue 17\n"


def test_what_a_user_hides_from_squeue_does_not_hide_the_job(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(slurm / "bin" / "squeue", f'[ -n "$SQUEUE_PARTITION" ] || cat {slurm}/state')
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    assert main(["requeue", "sh", "-c", "exit 75"]) == 75
    assert requeued(slurm) == "requeue 17\n"


@pytest.mark.parametrize("program", ["squeue", "scontrol"])
def test_where_slurm_refuses_its_words_and_a_cure_are_told(
    slurm: Path, capsys: pytest.CaptureFixture[str], program: str
) -> None:
    stand_in(slurm / "bin" / program, "echo Unable to contact the controller >&2; exit 1")
    assert main(["requeue", "sh", "-c", "exit 75"]) == 75
    told = capsys.readouterr().err
    assert f"{program}: Unable to contact the controller" in told
    assert "put it back with: scontrol requeue 17" in told


def test_outside_of_a_job_there_is_no_queue(
    slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    assert main(["requeue", "sh", "-c", "exit 75"]) == 75
    assert requeued(slurm) == "" and "no SLURM job" in capsys.readouterr().err


def test_a_command_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["requeue", "no-such-mpirun", "-n", "2"]) == 2
    assert "cannot start no-such-mpirun: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_warning_reaches_the_command_as_sigusr1(slurm: Path, number: signal.Signals) -> None:
    ready = slurm / "ready"
    script = f"trap 'exit 75' USR1; touch {ready}; while :; do sleep 0.05; done"
    with subprocess.Popen(
        [sys.executable, "-m", "dearmpi.cli.main", "requeue", "sh", "-c", script],
        # What a batch script leaves to it: SLURM may warn at any time.
        preexec_fn=lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    ) as job:
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        job.send_signal(number)
        assert job.wait(timeout=180) == 75
    assert requeued(slurm) == "requeue 17\n"


def test_the_time_limit_does_not_end_what_puts_the_job_back(slurm: Path) -> None:
    """SLURM sends SIGTERM to every process of the batch step."""
    stand_in(slurm / "bin" / "squeue", f"kill -TERM $PPID $$; cat {slurm}/state")
    command = [sys.executable, "-m", "dearmpi.cli.main", "requeue", "sh", "-c", "exit 75"]
    assert subprocess.run(command, timeout=180, check=False).returncode == 75
    assert requeued(slurm) == "requeue 17\n"


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)]
    with WarningSignals() as warnings:
        assert warnings.run(["true"]) == 0
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)] == before
