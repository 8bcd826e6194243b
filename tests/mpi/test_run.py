"""dear-train under mpirun, as a user starts it: how it ends, with which words and exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dearmpi
from dearmpi.train import checkpoint
from dearmpi.train.metrics import metrics
from tests.forks import forked
from tests.job import Ended, Job, clean_environment, run_job

pytestmark = pytest.mark.ranks(1)  # each test starts ranks of its own

NEEDS_MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch is too old")
ROOT = Path(dearmpi.__file__).parents[1]
LIMIT_S = 90.0  # below the limit of a test, so that a job that hangs is shown
END_S = 10.0  # how long a job may go on after one of its ranks has failed

TASK = """
import os
import sys
import time
import torch
from torch import nn

import dearmpi
from dearmpi.cli import endings
from dearmpi.train.tasks.task import Task


class Data:
    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == self.bad:
            raise OSError("the disk has a hole here")
        return torch.full((3,), index / 64), torch.tensor([index / 64])


class Normed(torch.optim.SGD):
    # Its step of a tensor has length lr: it needs whole tensors.

    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.grad /= weight.grad.norm() + 1e-9
        return super().step(closure)


def make(options):
    last = dearmpi.connect().rank == dearmpi.connect().size - 1
    wrong, pause_s = options.get("wrong", ""), float(options.get("pause_s", "0"))
    bad = int(options.get("bad", "-1"))
    if wrong == "everywhere":  # however busy the machine is, the others leave it to rank 0
        endings._GRACE_OF_OTHERS_S = 30.0
    steps = [0]

    def loss(model, batch):
        steps[0] += model.training
        time.sleep(pause_s)
        if steps[0] == 4 and model.training:
            if wrong == "everywhere":
                raise RuntimeError("a mistake in the loss")
            if wrong == "exit" and last:
                os._exit(13)
            if wrong == "sys.exit" and last:
                sys.exit(23)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    model = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1))
    return Task("line", model, Data(bad), loss, defaults={"max_steps": 8, "batch_size": 16})
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "line.py").write_text(TASK)
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dearmpi.cli.main", *arguments]


ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def launch(folder: Path, *arguments: str, ranks: int = 2) -> Ended:
    run = forked(command("run", "--task", "line.py:make", *arguments))
    return run_job(run, ranks=ranks, limit_s=LIMIT_S, folder=folder, environment=ENVIRONMENT)


def start(folder: Path, *arguments: str, ranks: int = 2) -> Job:
    run = forked(command("run", "--task", "line.py:make", *arguments))
    return Job(run, ranks=ranks, limit_s=LIMIT_S, folder=folder, environment=ENVIRONMENT)


def aborted_with(code: int) -> tuple[int, int]:
    """What a launcher may make of MPI_Abort(code): the code, or that it had to kill the others."""
    return code, signal.SIGKILL


def told(ended: Ended) -> list[str]:
    """The lines with errors."""
    return [line for line in ended.output.splitlines() if "error: " in line]


@pytest.fixture
def job(folder: Path) -> Iterator[Job]:
    """A run that would go on for long, after its first lines."""
    with start(
        folder,
        *("--name", "a", "--max-steps", "100000", "--log-interval", "2"),
        *("--task-option", "pause_s=0.02"),
    ) as job:
        assert job.wait_for("step 4/100000", timeout_s=LIMIT_S), job.output()
        yield job


def test_a_run_on_four_ranks_ends_well(folder: Path) -> None:
    ended = launch(folder, "--name", "a", "--log-interval", "4", ranks=4)
    assert ended.returncode == 0, ended.output
    assert not told(ended) and ended.left_over == 0
    assert ended.output.count("done at step 8 of 8") == 1
    assert "line on 4 ranks" in ended.output and "hidden behind computation" in ended.output
    assert [row.step for row in metrics.read(folder / "runs" / "a")] == [4, 8]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--lrr", "3"], 2, "'--lrr'"),
        (["--lr", "fast"], 2, "--lr is 'fast'"),
        (["--batch-size", "1"], 2, "need at least 2"),
        (["--resume", "nowhere"], 6, "nowhere is no folder"),
    ],
)
def test_what_all_ranks_refuse_is_told_once(
    folder: Path, arguments: list[str], code: int, message: str
) -> None:
    ended = launch(folder, *arguments)
    assert ended.returncode == code, ended.output
    (line,) = told(ended)
    assert message in line and line.startswith("dear-train: error: ")
    assert "Traceback" not in ended.output and "Abort" not in ended.output
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("optimizer", "within"),
    [
        ("line.py:Normed", 1e-5),
        pytest.param("Muon", 0.02, marks=NEEDS_MUON),  # whose products are in bf16
    ],
)
def test_whole_tensor_optimizers_and_batch_shares_train_as_one_rank_does(
    folder: Path, optimizer: str, within: float
) -> None:
    losses = {}
    for ranks, shares in (1, "even"), (2, "2,1"):
        ended = launch(
            folder,
            *("--name", str(ranks), "--log-interval", "2", "--batch-size", "15", "--lr", "0.01"),
            *("--optimizer", optimizer, "--batch-shares", shares),
            ranks=ranks,
        )
        assert ended.returncode == 0, ended.output
        losses[ranks] = [row.loss or 0.0 for row in metrics.read(folder / "runs" / str(ranks))]
    assert losses[2] == pytest.approx(losses[1], rel=within) and len(losses[2]) == 4
    assert losses[2][-1] < 0.8 * losses[2][0]


def test_workers_load_the_same_samples_and_are_gone_at_the_end(folder: Path) -> None:
    losses = []
    for workers in ("0", "1"):
        ended = launch(folder, "--name", workers, "--workers", workers, "--log-interval", "2")
        assert ended.returncode == 0 and ended.left_over == 0, ended.output
        assert ("loaded ahead by 1 worker" in ended.output) == (workers == "1")
        losses.append([row.loss for row in metrics.read(folder / "runs" / workers)])
    assert losses[0] == losses[1] and len(losses[0]) == 4


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_sample_that_one_rank_cannot_read_ends_the_job_with_its_name(
    folder: Path, workers: str
) -> None:
    ended = launch(folder, "--name", "a", "--task-option", "bad=17", "--workers", workers)
    assert ended.returncode in aborted_with(5), ended.output
    assert ended.left_over == 0
    (line,) = told(ended)
    assert line.startswith("[rank ") and "sample 17 of 64 cannot be read" in line
    assert "the disk has a hole here" in line and "Traceback" not in ended.output
    logs = [path.read_text() for path in (folder / "runs" / "a" / "logs").iterdir()]
    assert sum("the disk has a hole here" in log and "Traceback" in log for log in logs) == 1


def test_a_mistake_on_all_ranks_is_told_by_rank_0_with_its_place(folder: Path) -> None:
    ended = launch(folder, "--name", "a", "--task-option", "wrong=everywhere", ranks=3)
    assert ended.returncode in aborted_with(1), ended.output
    (line,) = told(ended)
    assert line.startswith("[rank 0 on ") and "RuntimeError: a mistake in the loss" in line
    assert "line.py:" in line and "logs/rank-00000.log" in line


def test_a_rank_that_vanishes_ends_the_job(folder: Path) -> None:
    ended = launch(folder, "--task-option", "wrong=exit")
    assert ended.returncode not in (0, 124), ended.output
    assert ended.left_over == 0


def test_a_rank_that_exits_by_itself_ends_the_job_with_its_status(folder: Path) -> None:
    """Not with that of those who wait for it in vain, half a minute later."""
    ended = launch(folder, "--task-option", "wrong=sys.exit", "--name", "a")
    assert ended.returncode in aborted_with(23), ended.output
    (line,) = told(ended)
    assert line.startswith("[rank 1 on ")
    assert "error: ended itself, and with it the job, by sys.exit(23) (" in line
    assert "line.py:" in line and line.endswith("a/logs/rank-00001.log")


def test_killing_one_rank_ends_the_job_in_time(job: Job) -> None:
    before_s = job.duration_s
    job.signal_rank(1, signal.SIGKILL)
    ended = job.wait()
    assert ended.returncode not in (0, 124), ended.output
    assert ended.duration_s - before_s < END_S
    assert ended.left_over == 0


def test_sigusr1_to_one_rank_saves_and_ends_all_with_75_and_resume_goes_on(
    job: Job, folder: Path
) -> None:
    job.signal_rank(1, signal.SIGUSR1)
    ended = job.wait()
    assert ended.returncode == 75, ended.output
    assert "stopped as asked at step " in ended.output and not told(ended)
    latest = checkpoint.find_latest(folder / "runs" / "a")
    assert latest is not None
    step = int(latest.name.removeprefix("step-"))
    resumed = launch(
        folder,
        *("--name", "a", "--resume", "auto", "--max-steps", str(step + 2)),
        ranks=3,  # another number than before
    )
    assert resumed.returncode == 0, resumed.output
    assert f"resumed at step {step}" in resumed.output
    steps = [row.step for row in metrics.read(folder / "runs" / "a")]
    assert steps == sorted(set(steps)) and steps[-1] == step + 2


def test_one_process_needs_no_mpirun(folder: Path) -> None:
    ended = subprocess.run(
        forked(command("run", "--task", "line.py:make", "--name", "a")),
        cwd=folder,
        env=clean_environment() | ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "line on 1 rank," in ended.stdout and "done at step 8 of 8" in ended.stdout


def test_the_exported_model_is_the_trained_one(folder: Path) -> None:
    assert launch(folder, "--name", "a").returncode == 0
    ended = run_job(
        forked(command("checkpoint", "export", "runs/a", "model.pt")),
        ranks=1,
        limit_s=LIMIT_S,
        folder=folder,
        environment=ENVIRONMENT,
    )
    assert ended.returncode == 0, ended.output
    latest = checkpoint.find_latest(folder / "runs" / "a")
    assert latest is not None
    trained = checkpoint.load(latest).model
    exported = torch.load(folder / "model.pt", weights_only=True)
    assert list(exported) == list(trained)
    assert all(torch.equal(exported[name], trained[name]) for name in trained)
