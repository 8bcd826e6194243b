"""dear-train run, before its ranks have met."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dearmpi.cli.run import run_together
from dearmpi.comm import lifecycle as module
from dearmpi.comm.backends.alone import AloneCollectives
from dearmpi.comm.world import World
from dearmpi.train.ranks.stop import EXIT_PREEMPTED
from dearmpi.train.settings.sources import make_source

TASK = """
import torch
from torch import nn

from dearmpi.train.tasks.task import Task


def make(options):
    data = [(torch.full((3,), i / 8), torch.tensor([i / 8])) for i in range(8)]

    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    return Task("line", nn.Linear(3, 1), data, loss)
"""


@pytest.fixture
def task_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "line.py"
    path.write_text(TASK)
    threads = torch.get_num_threads()
    before = signal.getsignal(signal.SIGUSR1)
    yield path
    signal.signal(signal.SIGUSR1, before)
    torch.set_num_threads(threads)


def test_a_signal_while_mpi_begins_is_not_lost(
    task_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: object, **__: object) -> World:
        signal.raise_signal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # as MPI may do
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return World(AloneCollectives(), progress="poll")

    monkeypatch.setattr(module, "connect", connect)
    folder = task_file.parent / "runs"
    given = {"task": f"{task_file}:make", "run_folder": str(folder), "name": "a", "epochs": 9}
    assert run_together(lambda: [make_source("flag", given | {"batch_size": 4})]) == EXIT_PREEMPTED
    assert (folder / "a" / "latest").read_text() == "checkpoints/step-00000001\n"


def test_a_name_in_a_file_that_a_batch_scripts_flag_overrules_is_told(
    task_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        module, "connect", lambda *_, **__: World(AloneCollectives(), progress="poll")
    )
    given = {"task": f"{task_file}:make", "run_folder": str(task_file.parent), "name": "job-17"}
    file = make_source("file", {"name": "a", "batch_size": 4}, origin="my.yaml")
    assert run_together(lambda: [make_source("flag", given), file]) == 0
    assert "--name job-17 overrules name in my.yaml, which is a;" in capsys.readouterr().out
