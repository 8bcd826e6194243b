"""The batch scripts in a real SLURM with two nodes: how jobs run, stop, go on and end."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dearmpi.train import checkpoint
from dearmpi.train.metrics import metrics
from tests.slurm.cluster import KILL_WAIT_S, Cluster, JobState

SCRIPTS = Path(__file__).resolve().parents[2] / "slurm"
LIMIT_S = 120.0
NUM_STEPS = 60

TASK = """
import os
import time
from pathlib import Path

import torch
from torch import nn

from dearmpi.train.tasks.task import Task


class Data:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((3,), index / 64), torch.tensor([index / 64])


def make(options):
    # A job that is to be interrupted takes its time until the test has done so.
    leisurely = options.get("leisurely") == "yes"
    hurry = Path(f"hurry-{os.environ['SLURM_JOB_ID']}")

    def loss(model, batch):
        if leisurely and not hurry.exists():
            time.sleep(0.2)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    # What is dropped out is random, so a run that goes on must also restore that.
    model = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 1))
    return Task("line", model, Data(), loss, defaults={"batch_size": 16})
"""
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")
LEISURELY = ("--log-interval", "2", "--task-option", "leisurely=yes")
LONG = ("--max-steps", "100000", *LEISURELY)


@dataclass(frozen=True, slots=True)
class Site:
    """A folder that all nodes share, and what happens to jobs that are submitted from it."""

    cluster: Cluster
    folder: Path

    def submit(self, script: str, *arguments: str, options: tuple[str, ...] = TWO_NODES) -> int:
        """Put slurm/``script`` into the queue; returns its number."""
        told = self.cluster.call(
            "sbatch",
            "--parsable",
            "--output=%j.out",
            *options,
            SCRIPTS / script,
            *arguments,
            folder=self.folder,
        )
        return int(told)

    def output(self, job: int) -> str:
        path = self.folder / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def wait_for(self, text: str, job: int) -> None:
        """Until the job has printed ``text``."""
        self._wait(job, lambda: text in self.output(job))

    def wait_for_end(self, job: int) -> JobState:
        """Until the job has left the queue."""
        self._wait(job, lambda: not self.is_queued(job))
        return self.cluster.job(job)

    def is_queued(self, job: int) -> bool:
        return str(job) in self.cluster.call("squeue", "--noheader", "--format=%A").split()

    def cancel(self, job: int) -> None:
        self.cluster.call("scancel", str(job))

    def model(self, run: str, step: int) -> dict[str, torch.Tensor]:
        return checkpoint.load(self.folder / f"runs/{run}/checkpoints/step-{step:08d}").model

    def _wait(self, job: int, condition: Callable[[], bool]) -> None:
        try:
            self.cluster.wait_until(condition, timeout_s=LIMIT_S)
        except TimeoutError as error:
            raise AssertionError(f"job {job} printed: {self.output(job)}") from error


@pytest.fixture(scope="session")
def site(cluster: Cluster) -> Site:
    folder = cluster.folder / "home"
    folder.mkdir()
    (folder / "line.py").write_text(TASK)
    return Site(cluster, folder)


@pytest.fixture(scope="session", autouse=True)
def limited(site: Site) -> int:
    """A job near its time limit. SLURM looks only now and then, so it starts before all others."""
    options = (*TWO_NODES, "--time=1", "--overcommit")
    return site.submit("train.sbatch", "--task", "line.py:make", *LONG, options=options)


@pytest.fixture(scope="session")
def whole(site: Site) -> dict[str, torch.Tensor]:
    """The model of a run that nothing interrupted, submitted by ``dear-train slurm``."""
    told = site.cluster.call(
        *("dear-train", "slurm", "--nodes", "2", "--ntasks-per-node", "1", "--submit"),
        *("--sbatch-option", "output=%j.out", "--"),
        *("--task", "line.py:make", "--max-steps", str(NUM_STEPS), "--log-interval", "20"),
        folder=site.folder,
    )
    job = int(told.removeprefix("Submitted batch job "))
    ended = site.wait_for_end(job)
    assert ended == JobState("COMPLETED", 0, restarts=0), site.output(job)
    assert "line on 2 ranks" in site.output(job)
    return site.model(f"job-{job}", NUM_STEPS)


def start_interruptible(site: Site, script: str) -> int:
    """A job of as many steps as ``whole``, in the middle of them."""
    length = ("--max-steps", str(NUM_STEPS))
    job = site.submit(script, "--task", "line.py:make", *length, *LEISURELY)
    site.wait_for(f"step 2/{NUM_STEPS}", job)
    return job


def check_went_on(site: Site, job: int, whole: dict[str, torch.Tensor]) -> None:
    (site.folder / f"hurry-{job}").touch()
    ended = site.wait_for_end(job)
    assert ended == JobState("COMPLETED", 0, restarts=1), site.output(job)
    assert "resumed at step " in site.output(job)
    steps = [row.step for row in metrics.read(site.folder / f"runs/job-{job}")]
    assert steps == sorted(set(steps)) and steps[-1] == NUM_STEPS
    model = site.model(f"job-{job}", NUM_STEPS)
    assert all(torch.equal(tensor, model[name]) for name, tensor in whole.items())


def test_a_job_that_is_warned_is_queued_again_and_ends_with_the_same_numbers(
    site: Site, whole: dict[str, torch.Tensor]
) -> None:
    job = start_interruptible(site, "train.sbatch")
    site.cluster.call("scancel", "--batch", "--signal=USR1", str(job))
    site.wait_for(f"job {job} is queued again", job)
    assert "stopped by SIGUSR1" in site.output(job)
    check_went_on(site, job, whole)


def test_a_job_near_its_time_limit_saves_and_is_queued_again(site: Site, limited: int) -> None:
    site.wait_for(f"job {limited} is queued again", limited)
    assert "stopped by SIGUSR1" in site.output(limited)
    site.cluster.wait_until(lambda: site.cluster.job(limited).restarts > 0)
    site.cancel(limited)
    assert (site.folder / f"runs/job-{limited}/latest").exists()


def test_a_job_that_is_preempted_is_queued_again_and_ends_with_the_same_numbers(
    site: Site, whole: dict[str, torch.Tensor]
) -> None:
    job = start_interruptible(site, "train-srun.sbatch")
    urgent = site.cluster.call(
        *("sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive"),
        *("--output=/dev/null", "--wrap=true"),
    )
    site.wait_for(f"job {job} is queued again", job)
    assert "stopped by SIGTERM" in site.output(job)
    assert site.wait_for_end(int(urgent)).state == "COMPLETED"
    check_went_on(site, job, whole)


@pytest.mark.parametrize("script", ["train.sbatch", "train-srun.sbatch"])
def test_a_job_that_loses_a_node_goes_on_with_the_others(site: Site, script: str) -> None:
    saves = ("--checkpoint-interval", "2", "--max-steps", str(NUM_STEPS), *LEISURELY)
    job = site.submit(script, "--task", "line.py:make", *saves)
    site.wait_for("step 6/", job)
    # SLURM takes it back when it next registers, but not into the job.
    site.cluster.call("scontrol", "update", "NodeName=s1", "State=DOWN", "Reason=lost")
    site.wait_for("no answer from s1: going on with 1 of 2 ranks", job)
    (site.folder / f"hurry-{job}").touch()
    ended = site.wait_for_end(job)
    assert (ended.state, ended.restarts) == ("COMPLETED", 0), site.output(job)
    assert "line on 1 rank," in site.output(job) and "resumed at step" in site.output(job)
    assert f"done at step {NUM_STEPS} of {NUM_STEPS}" in site.output(job)


def test_a_sweep_runs_each_line_in_a_job_of_its_own(site: Site) -> None:
    (site.folder / "sweep.txt").write_text("--lr 0.1\n--lr 0.2 --optimizer SGD\n")
    options = ("--array=1-2", "--nodes=1", "--ntasks-per-node=1", "--output=sweep-%a.out")
    arguments = ("sweep.txt", "--task", "line.py:make", "--max-steps", "4")
    job = site.submit("array.sbatch", *arguments, options=options)
    site.wait_for_end(job)
    site.cluster.wait_until(lambda: not site.is_queued(job), timeout_s=LIMIT_S)
    for index, settings in ((1, ("AdamW", "0.1")), (2, ("SGD", "0.2"))):
        output = (site.folder / f"sweep-{index}.out").read_text()
        assert "done at step 4 of 4" in output
        assert "{}, lr {},".format(*settings) in output
        assert (site.folder / f"runs/sweep-{job}-{index}/latest").exists()


def test_a_job_that_is_cancelled_ends_soon_for_good_and_leaves_no_process(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(site.cluster.environment, "DEARMPI_VENV", sys.prefix)  # without forks
    job = site.submit("train.sbatch", "--task", "line.py:make", *LONG)
    site.wait_for("step 2/", job)
    assert processes_of(job, site)
    began_s = time.monotonic()
    site.cancel(job)
    ended = site.wait_for_end(job)
    assert ended.state == "CANCELLED" and ended.restarts == 0
    assert time.monotonic() - began_s < KILL_WAIT_S  # by itself, and not by SIGKILL
    assert f"job {job} is COMPLETING, so it is not queued again" in site.output(job)
    assert not processes_of(job, site)


def processes_of(job: int, site: Site) -> list[str]:
    """Command lines of the living processes of a job."""
    marks = {f"SLURM_JOB_ID={job}", f"SLURM_CONF={site.cluster.environment['SLURM_CONF']}"}
    return [command for command, variables in _all_processes() if marks <= variables]


def _all_processes() -> Iterator[tuple[str, set[str]]]:
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (path / "environ").read_bytes().decode(errors="replace")
            command = (path / "cmdline").read_bytes().decode(errors="replace")
            yield command.replace("\0", " "), set(variables.split("\0"))


def test_srun_starts_several_ranks_on_each_of_several_nodes(site: Site) -> None:
    options = ("--nodes=2", "--ntasks-per-node=2")
    job = site.submit(
        "train-srun.sbatch", "--task", "line.py:make", "--max-steps=4", options=options
    )
    ended = site.wait_for_end(job)
    assert ended == JobState("COMPLETED", 0, restarts=0), site.output(job)
    assert "line on 4 ranks" in site.output(job)


def test_srun_without_pmi_is_refused_once_with_the_flag_to_use(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(site.cluster.environment, "DEARMPI_PMI", "none")
    job = site.submit("train-srun.sbatch", "--task", "line.py:make")
    ended = site.wait_for_end(job)
    assert (ended.state, ended.exit_code) == ("FAILED", 3), site.output(job)
    assert site.output(job).count("2 processes were launched, but MPI sees each as a world") == 1
    assert "--mpi=pmi2" in site.output(job)
