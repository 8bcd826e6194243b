"""Processes that ranks start, as data loaders do, and that read the script again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import dearmpi
from tests.job import Ended, find_mpiexec, launch_command, run_job

ROOT = Path(dearmpi.__file__).parents[1]
pytestmark = pytest.mark.ranks(1)  # each test starts ranks of its own

SCRIPT = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
from mpi4py import MPI
import dearmpi

how, method = (*sys.argv[1:], "", "")[:2]  # of which a fork server has none
if how == "calls MPI":
    rank = MPI.COMM_WORLD.Get_rank()
if how == "connects":
    dearmpi.connect()


def load(number):
    return 2 * number


if __name__ == "__main__":
    world = dearmpi.connect()
    with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
        loaded = list(pool.map(load, [3, 4]))
    if world.all_reduce([sum(loaded)]) == [28.0] and world.is_root:
        print("both ranks have loaded")
"""


def run_script(folder: Path, how: str, method: str) -> Ended:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), how, method]
    return run_job(command, ranks=2, limit_s=90.0, environment={"PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_of_a_script_that_imports_mpi_leave_it_alone(method: str, tmp_path: Path) -> None:
    """MPI would take each for the rank that has started it."""
    ended = run_script(tmp_path, "imports MPI", method)
    assert (ended.returncode, ended.output.count("both ranks have loaded")) == (0, 1), ended.output


def test_workers_that_call_mpi_as_they_read_the_script_are_told_of(tmp_path: Path) -> None:
    ended = run_script(tmp_path, "calls MPI", "spawn")
    assert ended.returncode, ended.output
    assert "Move such calls under if __name__ == '__main__':" in ended.output


def test_a_worker_that_connects_is_refused(tmp_path: Path) -> None:
    ended = run_script(tmp_path, "connects", "spawn")
    assert ended.returncode, ended.output
    assert "LaunchError: connect() was called in a process that rank " in ended.output
    assert "put the code that starts training under if __name__ == '__main__':" in ended.output


NESTED = """
import subprocess, sys
import dearmpi

world = dearmpi.connect()
if len(sys.argv) == 1:
    print("inside:", world.all_reduce([1.0]))
elif world.is_root:
    inside = [*sys.argv[1:], sys.executable, __file__]
    subprocess.run(inside, check=True, timeout=60)
world.barrier()
"""


def test_a_job_that_a_rank_launches_is_a_job_of_its_own(tmp_path: Path) -> None:
    """Although its ranks inherit what keeps workers from MPI."""
    script = tmp_path / "script.py"
    script.write_text(NESTED)
    launch = launch_command(find_mpiexec(Path(sys.executable)), 2, [])
    command = [sys.executable, str(script), *launch]
    ended = run_job(command, ranks=2, limit_s=90.0, environment={"PYTHONPATH": str(ROOT)})
    assert (ended.returncode, ended.output.count("inside: [2.0]")) == (0, 2), ended.output
