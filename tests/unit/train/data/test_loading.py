"""Batches, loaded by the training process or by others ahead of it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dearmpi.comm.world import World
from dearmpi.errors import ConfigError, DataError
from dearmpi.train.data.loading import (
    BatchLoader,
    BatchRequest,
    InlineLoader,
    WorkerLoader,
    open_loader,
)
from dearmpi.train.loop.stepping import coming_batches
from dearmpi.train.settings.settings import RunSettings
from dearmpi.train.tasks.task import Task
from tests.codes import raises
from tests.forks import forked
from tests.unit.train.points import SGD, equal, make_job, make_task, parameters, train

LIMIT_S = 240  # each process imports torch, also on a busy machine


class Squares:
    """Sample ``i`` is its square, and numbers drawn at random; 13 cannot be read."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        if index == 13:
            raise OSError("it is gone")
        drawn = (torch.rand(()).item(), np.random.random(), random.random())
        return torch.tensor([index * index, *drawn], dtype=torch.float64)


class Deadly(Squares):
    """To ask for sample 5 ends the process, as the system does where memory is out."""

    def __getitem__(self, index: int) -> Tensor:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def task_over(data: Any, **parts: Any) -> Task:
    return replace(make_task(), train_data=data, eval_data=Squares(), **parts)


@contextmanager
def ahead(data: Any, num_workers: int = 2, **parts: Any) -> Iterator[WorkerLoader]:
    loading = WorkerLoader(task_over(data, **parts), name="squares", num_workers=num_workers)
    try:
        yield loading
    finally:
        loading.close()


@pytest.fixture(scope="module")
def two_workers() -> Iterator[WorkerLoader]:
    """Over squares; one for several tests, since each process imports torch."""
    with ahead(Squares()) as loading:
        yield loading


def wanted(*starts: int, held_out: bool = False) -> list[BatchRequest]:
    return [BatchRequest((start, start + 1), held_out, seed=(7, start)) for start in starts]


def squares(batch: Any) -> list[float]:
    found: list[float] = batch[:, 0].tolist()
    return found


def test_batches_are_the_same_whoever_loads_them_and_in_whatever_order(
    two_workers: WorkerLoader,
) -> None:
    own, loading = InlineLoader(task_over(Squares())), two_workers
    train, held_out = wanted(0, 2, 4, 6, 8, 10), wanted(1, 3, held_out=True)
    loading.expect(train)
    loading.expect(held_out, held_out=True)
    order = [train[0], held_out[0], *train[1:4], held_out[1], train[5], train[4], *wanted(16)]
    for one in order:
        assert squares(loading.load(one)) == squares(own.load(one))
    loading.expect(train[2:])  # once more, from there
    assert squares(loading.load(train[2])) == [16.0, 25.0]


def test_what_is_random_follows_from_the_seed_and_not_from_the_workers(
    two_workers: WorkerLoader,
) -> None:
    def draw(loading: WorkerLoader, first: int) -> Tensor:
        coming = wanted(*range(first, 10, 2))
        loading.expect(coming)
        return torch.stack([loading.load(one) for one in coming])

    with ahead(Squares(), 1) as loading:
        drawn = draw(loading, 0)
    assert torch.equal(drawn, draw(two_workers, 0))
    assert torch.equal(drawn[2:], draw(two_workers, 4))
    noise = drawn[:, :, 1:]
    assert len(noise.unique()) == noise.numel()


class Marked(Squares):
    """Who loads a sample leaves a file of its number in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> Tensor:
        (self.folder / str(index)).touch()
        return super().__getitem__(index)

    def await_loaded(self, count: int) -> None:
        """Until that many have been loaded, from the first on."""
        until_s = time.monotonic() + LIMIT_S
        while {path.name for path in self.folder.iterdir()} != set(map(str, range(count))):
            assert time.monotonic() < until_s, sorted(self.folder.iterdir())
            time.sleep(0.01)


def test_two_batches_of_each_worker_are_loaded_before_they_are_wanted(tmp_path: Path) -> None:
    data = Marked(tmp_path)
    with ahead(data, 2) as loading:
        coming = wanted(*range(0, 12, 2))
        loading.expect(coming)
        data.await_loaded(2 * 4)
        loading.load(coming[0])
        data.await_loaded(2 * 5)


def test_nothing_is_loaded_in_the_training_process(two_workers: WorkerLoader) -> None:
    state = torch.get_rng_state()
    two_workers.load(wanted(0)[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_sample_that_cannot_be_read_is_named(two_workers: WorkerLoader) -> None:
    two_workers.expect(wanted(10, 12, 14))
    assert squares(two_workers.load(wanted(10)[0])) == [100.0, 121.0]
    with raises(DataError, "sample-unreadable", 13, 20, "it is"):
        two_workers.load(wanted(12)[0])
    assert squares(two_workers.load(wanted(14)[0])) == [196.0, 225.0]


def test_a_process_that_is_killed_ends_the_run_with_a_reason() -> None:
    with ahead(Deadly(), 1) as loading, raises(DataError, "worker-ended", "--workers"):
        loading.expect(wanted(0, 2, 4, 6))
        for one in wanted(0, 2, 4, 6):
            loading.load(one)


def test_data_that_no_other_process_can_have_are_refused() -> None:
    with raises(ConfigError, "task-not-picklable", 2, "--workers", 0):
        open_loader(
            task_over(Squares(), collate=lambda samples: samples), name="squares", num_workers=2
        )


def test_without_workers_anything_will_do() -> None:
    task = task_over(Squares(), collate=lambda samples: len(samples))
    loading: BatchLoader = open_loader(task, name="squares", num_workers=0)
    assert loading.load(wanted(0)[0]) == 2


def test_a_run_is_the_same_bit_by_bit(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several epochs, whose last batches are smaller, in parts, and with evaluations."""
    submitted: list[BatchRequest] = []
    submit = WorkerLoader._submit

    def noted(loading: WorkerLoader, one: BatchRequest) -> Any:
        submitted.append(one)
        return submit(loading, one)

    monkeypatch.setattr(WorkerLoader, "_submit", noted)
    ends = []
    for workers in (0, 2):
        settings = RunSettings(
            **SGD, workers=workers, epochs=3, gradient_accumulation_steps=6, eval_interval=2
        )
        job = make_job(alone, settings)
        _, notes = train(job, tmp_path / str(workers))
        losses = [(row.loss, row.eval_loss) for row in notes.rows]
        ends.append((parameters(job.task.model), losses))
    assert equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1] and len(ends[0][1]) > 3
    trained = [one for one in submitted if not one.held_out]
    assert trained == list(coming_batches(job, 0)), "some were not expected as they were wanted"


TASK_FILE = """
import torch
from torch import nn
from beside import Offset
from dearmpi.train.tasks.task import Task

class Numbers(Offset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return torch.tensor([float(index + self.offset)])

def collate(samples):
    return torch.stack(samples).sum()

def make(options):
    model = nn.Linear(1, 1)
    return Task("numbers", model, Numbers(), lambda model, batch: batch, collate=collate)
"""


@pytest.mark.parametrize("form", ["numbers.py:make", "numbers_module:make"])
def test_a_task_of_one_s_own_is_found_in_the_other_processes(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dearmpi.train.tasks.task_registry import build_task

    (tmp_path / "beside.py").write_text("class Offset:\n    offset = 100\n")
    for name in ("numbers.py", "numbers_module.py"):
        (tmp_path / name).write_text(TASK_FILE)
    monkeypatch.chdir(tmp_path)
    name = str(tmp_path / form) if ".py" in form else form
    task = build_task(name, {})
    loading = WorkerLoader(task, name=name, num_workers=1)
    assert float(loading.load(BatchRequest((0, 2)))) == 202.0
    loading.close()


RANK = """
import os, signal
from pathlib import Path
from dearmpi.train.data.loading import WorkerLoader, BatchRequest
from tests.unit.train.data.test_loading import Slow, task_over

if __name__ == "__main__":
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    slow = Slow(Path(__file__).parent / "workers")
    loading = WorkerLoader(task_over(slow), name="squares", num_workers=2)
    coming = [BatchRequest((start,)) for start in range(12)]
    loading.expect(coming)
    for number, one in enumerate(coming):
        print(int(loading.load(one)), flush=True)
        if number == 2:  # as SLURM does, ahead of the time limit and of preemption
            os.killpg(0, signal.SIGUSR1)
            os.killpg(0, signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Slow(Squares):
    """Sample ``i`` is the process that loads it, once two do; each leaves a file of its number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> Tensor:
        (self.folder / str(os.getpid())).touch()
        while len(list(self.folder.iterdir())) < 2:  # which begin when they come to it
            time.sleep(0.01)
        time.sleep(0.2)
        return torch.tensor(os.getpid())


def is_running(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends meanwhile
        return False
    return "Z" not in stat.rpartition(")")[2].split()[0]


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = folder / "rank.py"
    script.write_text(text)
    return subprocess.run(
        forked([sys.executable, script]),
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        start_new_session=True,
    )


def test_they_live_as_long_as_their_rank_whatever_the_job_is_told(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    process = run_script(tmp_path, RANK)
    assert process.returncode == -signal.SIGKILL, process.stderr
    workers = {int(word) for word in process.stdout.split()}
    assert len(process.stdout.split()) == 12 and len(workers) == 2
    until_s = time.monotonic() + LIMIT_S
    while any(map(is_running, workers)):
        assert time.monotonic() < until_s, f"{workers} outlive their rank"
        time.sleep(0.05)


class Endless(Deadly):
    """Samples from 6 on take an hour: a file server does not answer."""

    def __getitem__(self, index: int) -> Tensor:
        if index >= 6:
            time.sleep(3600)
        return super().__getitem__(index)


LAST = """
from dearmpi.errors import DataError
from dearmpi.train.data.loading import WorkerLoader, BatchRequest
from tests.unit.train.data.test_loading import Endless, task_over

if __name__ == "__main__":
    loading = WorkerLoader(task_over(Endless()), name="squares", num_workers=2)
    loading.load(BatchRequest((0,)))
    loading.expect(BatchRequest((sample,)) for sample in SAMPLES)
    try:
        if 5 in SAMPLES:
            loading.load(BatchRequest((5,)))
    except DataError:
        print("a process has ended")
    loading.close()
"""


@pytest.mark.parametrize(("samples", "said"), [((6, 7), ""), ((6, 5), "a process has ended\n")])
def test_at_the_end_of_a_run_nobody_waits_for_what_is_loaded(
    tmp_path: Path, samples: tuple[int, int], said: str
) -> None:
    """Nor where another one of the processes was killed."""
    process = run_script(tmp_path, LAST.replace("SAMPLES", str(samples)))
    assert (process.returncode, process.stdout) == (0, said), process.stderr
