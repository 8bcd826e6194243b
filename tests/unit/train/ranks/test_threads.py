"""How many cores torch may use in each rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dearmpi.comm.world import World
from dearmpi.config import ProgressMode
from dearmpi.train.loop.session import open_session
from dearmpi.train.ranks.threads import (
    RankCores,
    ThreadChoice,
    choose_threads,
    find_crowded,
    share_of_cores,
)
from dearmpi.train.settings.sources import make_source
from tests.fakes.ranks import run_ranks


def test_ranks_that_share_cores_divide_them() -> None:
    cores = range(8)
    assert share_of_cores(cores, [cores], num_helpers=0) == 4
    assert share_of_cores(cores, [cores, cores], num_helpers=0) == 2


def test_ranks_bound_to_cores_of_their_own_keep_them_all() -> None:
    assert share_of_cores([0, 1], [[2, 3], [4, 5], [6, 7]], num_helpers=0) == 2


def test_more_ranks_than_cores_leave_each_one_thread() -> None:
    assert share_of_cores([0, 1], [[0, 1]] * 4, num_helpers=1) == 1


def test_the_progress_thread_gets_a_core_only_where_there_are_several() -> None:
    assert share_of_cores(range(8), [], num_helpers=1) == 7
    assert share_of_cores(range(4), [], num_helpers=1) == 3
    assert share_of_cores(range(2), [], num_helpers=1) == 2


def test_processes_that_load_get_cores_as_far_as_there_are_some() -> None:
    assert share_of_cores(range(8), [], num_helpers=1 + 4) == 3
    assert share_of_cores(range(8), [], num_helpers=1 + 16) == 1


def test_what_the_user_asks_for_comes_before_the_environment(alone: World) -> None:
    environment = {"OMP_NUM_THREADS": "3"}
    asked = choose_threads(alone, requested=2, progress_thread=False, environment=environment)
    assert (asked.count, torch.get_num_threads()) == (2, 2)
    preset = choose_threads(alone, requested=None, progress_thread=False, environment=environment)
    assert (preset.count, torch.get_num_threads()) == (3, 3)
    assert "OMP_NUM_THREADS" in preset.reason


def test_a_host_with_more_threads_than_cores_is_named_with_the_numbers() -> None:
    (warning,) = find_crowded(
        [
            RankCores("roomy", range(8), 4),
            RankCores("tight", [0, 1], 2),
            RankCores("roomy", range(8), 4),
            RankCores("tight", [0, 1], 2),
            RankCores("tight", [2, 3], 2),
        ]
    )
    assert "ranks on tight: 3, their threads: 6, cores they may use: 4" in warning


def test_ranks_bound_to_one_core_crowd_it_whatever_the_host_has() -> None:
    assert find_crowded([RankCores("host", [5], 4)])
    assert not find_crowded([RankCores("host", [4, 5], 1), RankCores("host", [4, 5], 1)])


def test_the_choice_carries_the_warning(alone: World) -> None:
    asked = choose_threads(alone, requested=4096, progress_thread=False)
    assert len(asked.warnings) == 1 and "their threads: 4096" in asked.warnings[0]


TASK = """
import torch
from torch import nn
from dearmpi.train.tasks.task import Task


def make(options):
    model = nn.Linear(1, 1)
    for parameter in model.parameters():
        nn.init.ones_(parameter)  # ranks in one process draw from one generator
    return Task("line", model, [torch.ones(1)] * 64, lambda model, batch: model(batch).mean())
"""


@pytest.mark.usefixtures("alone")  # after which torch has as many threads as before
@pytest.mark.parametrize(("mode", "count"), [("thread", 7), ("poll", 8)])
def test_no_core_is_left_to_a_thread_that_mpi_does_not_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: ProgressMode, count: int
) -> None:
    """What is asked for is a thread in both, but below MPI_THREAD_MULTIPLE there is none."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "line.py").write_text(TASK)
    layer = make_source("flag", {"task": f"{tmp_path}/line.py:make", "run_folder": str(tmp_path)})

    def work(world: World) -> ThreadChoice:
        session = open_session(world, [layer])
        session.job.optimizer.close()
        return session.threads

    for found in run_ranks(2, work, progress=mode):
        assert found.count == count
        assert ("one core of each left to communication" in found.reason) == (mode == "thread")
