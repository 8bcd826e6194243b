"""A real job that loses a rank, and its host: `dear-train restart` goes on with the others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dearmpi
from dearmpi.train import checkpoint
from tests.forks import forked
from tests.job import clean_environment, run_job

pytestmark = pytest.mark.ranks(1)  # each test starts ranks of its own

ROOT = Path(dearmpi.__file__).parents[1]
LIMIT_S = 90.0
NUM_STEPS, LOST_AT = 12, 7  # a checkpoint every third step; the second may not be written yet

# The last rank's host is lost at a step, and the rank is killed with it.
TASK = f"""
import os
import signal
from pathlib import Path

import torch
from torch import nn

from dearmpi.train.tasks.task import Task


class Data:
    def __len__(self):
        return 96

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        inputs = torch.randn(5, generator=drawn, dtype=torch.float64)
        return inputs, inputs.sum().reshape(1).sin()


class Lose:
    def on_step_end(self, fit):
        lost = Path("lost-n2")
        if fit.step == {LOST_AT} and fit.world.rank == 2 and not lost.exists():
            lost.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def make(options):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    loss = lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])
    return Task("sine", model, Data(), loss, callbacks=(Lose(),),
                defaults={{"max_steps": {NUM_STEPS}, "batch_size": 12}})
"""

# Stands for ssh: a host that is lost starts nothing.
REMOTE = """#!/bin/sh
while :; do case $1 in -*) shift ;; *) break ;; esac; done
host=$1
shift
[ ! -e "{folder}/lost-$host" ] || exit 255
exec sh -c "$*"
"""


def training(*arguments: str) -> list[str | Path]:
    run = [sys.executable, "-m", "dearmpi.cli.main", "run", "--task", "sine.py:make"]
    return forked([*run, "--checkpoint-interval", "3", *arguments])


def test_a_job_goes_on_without_the_host_whose_rank_was_killed(tmp_path: Path) -> None:
    """From its last checkpoint, with the batch that it had: up to rounding what one process trains
    that is never interrupted.
    """
    (tmp_path / "sine.py").write_text(TASK)
    remote = tmp_path / "remote"
    remote.write_text(REMOTE.format(folder=tmp_path))
    remote.chmod(0o755)
    command = [
        *(sys.executable, "-m", "dearmpi.cli.main", "restart", "--max-restarts", "1"),
        *(Path(sys.executable).with_name("mpirun"), "-launcher", "ssh", "-launcher-exec", remote),
        *("-hosts", "n0,n1,n2", "-ppn", "1", "-n", "3"),
        *training("--name", "a", "--resume", "auto"),
    ]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    job = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=clean_environment() | {"PYTHONPATH": path},
        start_new_session=True,
    )
    try:
        output = job.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        pytest.fail(job.communicate()[0])
    assert job.returncode == 0, output
    assert "no answer from n2: going on with 2 of 3 ranks, start 2" in output
    assert re.search(r"resumed at step [36]\b", output), output
    assert "sine on 3 ranks" in output and "sine on 2 ranks" in output
    alone = run_job(
        training("--name", "b"),
        ranks=1,
        limit_s=LIMIT_S,
        folder=tmp_path,
        environment={"PYTHONPATH": path},
    )
    assert alone.returncode == 0, alone.output
    expected, found = (
        checkpoint.load(checkpoint.resolve(tmp_path / "runs" / name)) for name in ("b", "a")
    )
    assert found.step == expected.step == NUM_STEPS
    for name, values in expected.model.items():
        assert torch.allclose(found.model[name], values, rtol=1e-9, atol=1e-12), name
