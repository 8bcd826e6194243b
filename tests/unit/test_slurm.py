"""The batch script, with stand-ins for SLURM's commands and mpirun."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "slurm" / "train.sbatch"


def stand_in(folder: Path, name: str, body: str) -> None:
    """An executable ``name`` that writes its arguments to ``name.log`` and then does ``body``."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "$*" >> {folder}/{name}.log\n{body}\n')
    path.chmod(0o755)


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {
        "PATH": os.environ["PATH"],
        "DEARMPI_VENV": str(folder),
        "SLURM_JOB_ID": "17",
        "SLURM_NTASKS": "4",
    }
    return subprocess.Popen(
        ["bash", str(SCRIPT), *arguments],
        env=environment,
        cwd=folder,
        # SLURM starts jobs with every signal at its default; whoever runs the tests may ignore
        # this one, and a shell cannot trap what was ignored when it began.
        preexec_fn=lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL),
    )


def test_arguments_reach_every_rank_and_success_is_not_requeued(tmp_path: Path) -> None:
    stand_in(tmp_path, "mpirun", "exit 0")
    stand_in(tmp_path, "scontrol", "")
    assert start(tmp_path, "--task", "digits").wait(timeout=20) == 0
    told = (tmp_path / "mpirun.log").read_text()
    assert told.startswith("-n 4 dear-train run ")
    assert "--name job-17 --resume auto --task digits" in told
    assert not (tmp_path / "scontrol.log").exists()


def test_a_run_that_stopped_with_a_checkpoint_is_requeued(tmp_path: Path) -> None:
    stand_in(tmp_path, "mpirun", "exit 75")
    stand_in(tmp_path, "scontrol", "")
    assert start(tmp_path).wait(timeout=20) == 75
    assert (tmp_path / "scontrol.log").read_text() == "requeue 17\n"


def test_a_failed_run_is_not_requeued(tmp_path: Path) -> None:
    stand_in(tmp_path, "mpirun", "exit 6")
    stand_in(tmp_path, "scontrol", "")
    assert start(tmp_path).wait(timeout=20) == 6
    assert not (tmp_path / "scontrol.log").exists()


def test_the_signal_before_the_time_limit_reaches_the_ranks(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    stand_in(
        tmp_path,
        "mpirun",
        f"trap 'exit 75' USR1\ntouch {ready}\nwhile :; do sleep 0.1; done",
    )
    stand_in(tmp_path, "scontrol", "")
    job = start(tmp_path)
    deadline = time.monotonic() + 20
    while not ready.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=20) == 75
    assert (tmp_path / "scontrol.log").read_text() == "requeue 17\n"
