"""What is left of a run that is killed at random moments, again and again?

Usage: python -m benchmarks.faults [--kills N] [--seed S] [--kinds KIND ...]
                                   [--ranks N ...] [--seconds S]

A small training that saves every three steps is ended by a fault, checked, and resumed with
``--resume auto`` until it reaches its end; then the next one begins, on 2, 3 and 4 ranks in turn or
as given. After each fault the newest checkpoint must load with all checksums, and none that was
announced may be lost; at the end every step's loss and the parameters must be those of a run
without faults, bit for bit. Prints a table, and exits with 1 if anything was otherwise.

A third of the faults comes while the run starts or resumes, the others while it trains.

Kinds: rank, mpirun, all (SIGKILL of these), term (SIGTERM to mpirun), stop (SIGSTOP of a rank, with
a stall limit of 8 s; a rank that is stopped when all others have ended goes on after it), disk (the
file system of the run folder, a tmpfs, fills up; needs root).
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.small_disk import fill_up, small_disk
from dearmpi.train import checkpoint
from dearmpi.train.metrics import metrics
from tests.job import Job

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("rank", "mpirun", "all", "term", "stop", "disk")
WORLD_SIZES = (2, 3, 4)
NUM_STEPS = 60
STALL_S = 8.0  # more than what lies between ranks that load torch, four of them on two cores
MOST_MOMENT_S = 1.0  # after a run's first step, in which the fault comes
START_S = 3.0  # about as long as a run takes to start, in which the others come
END_S = 20.0  # how long a job may go on after a fault, the stall limit aside
LIMIT_S = 150.0

TASK = """
import time
import torch
from torch import nn
from dearmpi.train.tasks.task import Task

def loss(model, batch):
    time.sleep(0.005)
    return nn.functional.mse_loss(model(batch[0]), batch[1])

def make(options):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 32, generator=generator)
    data = [(x, x.sum().sin().reshape(1)) for x in inputs]
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Dropout(0.1), nn.Linear(256, 256),
                          nn.Tanh(), nn.Linear(256, 1))
    return Task("sines", model, data, loss)
"""


@dataclass(slots=True)
class Tally:
    """What came of the faults of one kind."""

    count: int = 0
    codes: set[int] = field(default_factory=set)
    longest_s: float = 0.0
    steps_lost: int = 0
    problems: list[str] = field(default_factory=list)


class Campaign:
    """Faults one after the other, and what came of them; ``folder`` is where the runs live."""

    def __init__(self, folder: Path, *, seed: int, world_sizes: Sequence[int]) -> None:
        self.tallies: dict[str, Tally] = defaultdict(Tally)
        self.num_finished = 0
        self._folder, self._chance = folder, random.Random(seed)
        self._world_sizes = world_sizes
        self._filler = folder / "filler"
        self._number = 0
        self._references: dict[int, Path] = {}
        (folder / "sines.py").write_text(TASK)

    @property
    def world_size(self) -> int:
        """Of the run at hand."""
        return self._world_sizes[self._number % len(self._world_sizes)]

    def strike(self, kind: str) -> None:
        """Go on with the run at hand until a fault of ``kind``, then check what is left; a run that
        reaches its end first is compared, and the fault strikes the next one.
        """
        while True:
            name = f"run-{self._number:03d}"
            with self._start(name, self.world_size) as job:
                self._await_moment(job)
                if len(job.rank_pids()) == self.world_size:
                    self._fault(kind, job, name)
                    return
                ended = job.wait()
                if ended.returncode != 0:
                    self.tallies[kind].problems.append(f"ended by itself: {ended.output[-2000:]}")
                    return
            self._compare(name)

    def _await_moment(self, job: Job) -> None:
        """Until a random moment, after all ranks are there, or until the end."""
        most_s = START_S
        if self._chance.random() > 1 / 3:
            job.wait_for(f"/{NUM_STEPS}  ", timeout_s=LIMIT_S)  # the line of a step
            most_s = MOST_MOMENT_S
        deadline = time.monotonic() + self._chance.uniform(0.0, most_s)
        while job.is_running():
            if time.monotonic() > deadline and len(job.rank_pids()) == self.world_size:
                break
            time.sleep(0.005)

    def _start(self, name: str, world_size: int) -> Job:
        arguments = [
            *("run", "--task", str(self._folder / "sines.py") + ":make", "--name", name),
            *("--run-folder", str(self._folder / "runs"), "--resume", "auto"),
            *("--max-steps", str(NUM_STEPS), "--batch-size", "16", "--log-interval", "1"),
            *("--checkpoint-interval", "3", "--lr", "0.001", "--bucket-cap-mb", "0.1"),
            *("--stall-warning-s", str(STALL_S / 2), "--stall-abort-s", str(STALL_S)),
        ]
        return Job(
            [sys.executable, "-m", "dearmpi.cli.main", *arguments],
            ranks=world_size,
            limit_s=LIMIT_S,
            folder=self._folder,
            environment={"PYTHONPATH": str(ROOT)},
        )

    def _fault(self, kind: str, job: Job, name: str) -> None:
        tally = self.tallies[kind]
        tally.count += 1
        before_s = job.duration_s
        self._inject(kind, job)
        self._await_end(kind, job, before_s)
        seconds = job.duration_s - before_s
        left = describe_processes(job)
        ended = job.end()
        self._filler.unlink(missing_ok=True)
        tally.codes.add(ended.returncode)
        tally.longest_s = max(tally.longest_s, seconds)
        if seconds >= END_S + STALL_S or ended.left_over:
            tally.problems.append(f"{name}: {left} after {seconds:.0f} s: {ended.output[-1000:]}")
        self._check_state(tally, name, ended.output)
        print(
            f"{name} on {self.world_size} ranks: {kind}, {ended.returncode}, {seconds:.1f} s",
            file=sys.stderr,
        )

    def _inject(self, kind: str, job: Job) -> None:
        match kind:
            case "rank":
                job.signal_rank(self._chance.randrange(self.world_size), signal.SIGKILL)
            case "stop":
                job.signal_rank(self._chance.randrange(self.world_size), signal.SIGSTOP)
            case "mpirun":
                job.signal_launcher(signal.SIGKILL)
            case "term":
                job.signal_launcher(signal.SIGTERM)
            case "all":
                for pid in job.rank_pids().values():
                    os.kill(pid, signal.SIGKILL)
                job.signal_launcher(signal.SIGKILL)
            case "disk":
                fill_up(self._filler)

    def _await_end(self, kind: str, job: Job, before_s: float) -> None:
        """Until all ranks have ended, or for as long as they may take. before_s: of the fault."""
        while job.is_running() or job.rank_pids():
            seconds = job.duration_s - before_s
            if seconds > END_S + STALL_S:
                break
            alone = len(job.rank_pids()) == 1 and "gave up" not in job.output()
            if kind == "stop" and seconds > STALL_S and alone:
                # Stopped when all others had ended, which nobody is left to notice.
                for rank in job.rank_pids():
                    job.signal_rank(rank, signal.SIGCONT)
            time.sleep(0.02)

    def _check_state(self, tally: Tally, name: str, output: str) -> None:
        """The newest checkpoint loads, and is not older than what was announced."""
        saved = [int(step) for step in re.findall(r"saved \S*step-(\d+)", output)]
        taken = [int(step) for step in re.findall(r"^step (\d+)/", output, re.MULTILINE)]
        latest = checkpoint.find_latest(self._folder / "runs" / name)
        step = 0
        if latest is not None:
            try:
                step = checkpoint.load(latest).step
            except Exception as error:
                tally.problems.append(f"{name}: {error}")
        if saved and step < max(saved):
            tally.problems.append(f"{name}: step {max(saved)} was announced, {step} is there")
        tally.steps_lost = max(tally.steps_lost, max(taken, default=0) - step)

    def _compare(self, name: str) -> None:
        """A run that has reached its end is the one without faults, bit for bit."""
        runs = self._folder / "runs"
        reference = self._reference(self.world_size)
        rows, expected = read_losses(runs / name), read_losses(reference)
        if rows != expected:
            wrong = next((r for r, e in zip(rows, expected, strict=False) if r != e), rows[-1])
            self.tallies["comparison"].problems.append(f"{name}: row {wrong} differs")
        found, wanted = (
            checkpoint.load(p / "checkpoints" / f"step-{NUM_STEPS:08d}").model
            for p in (runs / name, reference)
        )
        if not all(torch.equal(found[key], wanted[key]) for key in wanted):
            self.tallies["comparison"].problems.append(f"{name}: parameters differ")
        self.num_finished += 1
        self._number += 1
        shutil.rmtree(runs / name)

    def _reference(self, world_size: int) -> Path:
        name = f"reference-{world_size}"
        if world_size not in self._references:
            with self._start(name, world_size) as job:
                ended = job.wait()
            assert ended.returncode == 0, ended.output
            self._references[world_size] = self._folder / "runs" / name
        return self._references[world_size]


def describe_processes(job: Job) -> str:
    """The ranks that are left, and what they do."""
    states = []
    for rank, pid in job.rank_pids().items():
        with suppress(OSError):
            text = Path(f"/proc/{pid}/status").read_text()
            states.append(f"rank {rank} is {text.partition('State:')[2].splitlines()[0].strip()}")
    return ", ".join(states) or "no rank is left"


def read_losses(run_folder: Path) -> list[tuple[int, float | None]]:
    """Every step's loss."""
    return [(row.step, row.loss) for row in metrics.read(run_folder)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ranks", type=int, nargs="+", default=WORLD_SIZES)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    chosen = parser.parse_args()
    kinds = [kind for kind in chosen.kinds if kind != "disk" or os.geteuid() == 0]
    if not kinds:
        parser.error("disk needs root, and nothing else is asked for")
    start_s = time.monotonic()
    with small_disk(wanted="disk" in kinds) as folder:
        campaign = Campaign(folder, seed=chosen.seed, world_sizes=chosen.ranks)
        order = (kinds * (chosen.kills // len(kinds) + 1))[: chosen.kills]
        random.Random(chosen.seed).shuffle(order)
        for kind in order:
            if time.monotonic() - start_s > chosen.seconds:
                break
            campaign.strike(kind)
    return report(campaign)


def report(campaign: Campaign) -> int:
    """Print the table; 1 if there were problems."""
    print(f"{'fault':10} {'times':>5} {'exit codes':>14} {'longest':>10} {'most steps lost':>16}")
    for kind, tally in campaign.tallies.items():
        codes = " ".join(map(str, sorted(tally.codes)))
        seconds = f"{tally.longest_s:.1f} s"
        print(f"{kind:10} {tally.count:5} {codes:>14} {seconds:>10} {tally.steps_lost:16}")
    problems = [f"{k}: {p}" for k, tally in campaign.tallies.items() for p in tally.problems]
    total = sum(tally.count for tally in campaign.tallies.values())
    print(f"{total} faults, {campaign.num_finished} runs compared, {len(problems)} problems")
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
