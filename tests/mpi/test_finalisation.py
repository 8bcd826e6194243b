"""Who finalises MPI, and when: once, in the process that has started it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dearmpi
from tests.forks import forked
from tests.job import Ended, clean_environment, run_job

ROOT = Path(dearmpi.__file__).parents[1]
pytestmark = pytest.mark.ranks(1)  # each test starts ranks of its own

FORK = """
import os, sys
import dearmpi

world = dearmpi.connect()
child = os.fork() if world.rank == 0 else None
if child == 0:
    sys.exit(5)
if child:
    print("the fork ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
world.barrier()
"""

WHO = """
import atexit, os, sys
how = sys.argv[1]

if how == "told not to":
    import mpi4py
    mpi4py.rc.finalize = False
if how == "mpi4py first":
    from mpi4py import MPI


def tell():
    from mpi4py import MPI
    os.write(1, b"finalised\\n" if MPI.Is_finalized() else b"not yet\\n")  # in one piece
    if how == "told not to":
        MPI.Finalize()


atexit.register(tell)  # before connect(), and so to be called after all of its own

import dearmpi

world = dearmpi.connect()
world.barrier()
if how == "closed":
    world.close()
"""

BY_ITSELF = """
import ctypes, sys, threading
import dearmpi
from dearmpi.comm.progress import progress
from dearmpi.comm.watchdog import watchdog
from dearmpi.comm.progress.lane import Work

world = dearmpi.connect()
world.barrier()
if "leaves" in sys.argv:
    world.leave()
if "fails" in sys.argv:  # as an update of the last step, which nobody has waited for

    def start():
        failed.release()
        raise ValueError("the last step is lost")

    failed, lane = threading.Semaphore(0), world.progress.open_lane("update", window=1)
    world.progress.submit(lane, Work("bucket 0", start, lambda: None))
    assert failed.acquire(timeout=60.0)

from mpi4py import MPI

if "as a library" in sys.argv:
    ctypes.CDLL(MPI.__file__).MPI_Finalize()
else:
    MPI.Finalize()
if "looks on" in sys.argv:  # as while the script draws its pictures
    progress._WAKE_S, watchdog._TEND_S = 0.01, 0.0  # not before: it must not look meanwhile
    looked, tend = threading.Semaphore(0), world._watchdog.tend
    world._watchdog.tend = lambda: (tend(), looked.release())
    assert all(looked.acquire(timeout=60.0) for _ in range(3))
"""

TRAINS = """
import sys
import dearmpi
import torch

world = dearmpi.connect("poll" if "polls" in sys.argv else None)
model = torch.nn.Linear(4, 3)
optimizer = dearmpi.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def step():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


from mpi4py import MPI

step()
if "one alone" not in sys.argv or world.rank:
    MPI.Finalize()
print(f"the sum is {sum(param.sum().item() for param in model.parameters())}\\n", end="")
if "ends" not in sys.argv:
    step()
    step()
"""

EXIT = """
import atexit, sys
import dearmpi

world = dearmpi.connect()
world.barrier()
if "a handler" in sys.argv:
    from mpi4py import MPI

    atexit.register(MPI.Finalize)
if world.is_root or "all" in sys.argv:
    sys.exit(3)
if "a handler" in sys.argv:
    world.barrier()  # in vain
"""

ALONE = """
import sys, threading
import dearmpi
from dearmpi.cli.main import main
from dearmpi.comm.backends import mpi

mpi.finalize = threading.Event().wait
sys.exit(main(["run", "--task", "digits"]))
"""

DOCTOR = ["-m", "dearmpi.cli.main", "doctor"]


def run(script: str, *arguments: str, folder: Path, ranks: int = 2) -> Ended:
    path = folder / "script.py"
    path.write_text(script)
    return run_job(
        forked([sys.executable, path, *arguments]),
        ranks=ranks,
        limit_s=90.0,
        environment={"PYTHONPATH": str(ROOT)},
    )


def test_a_fork_of_a_rank_ends_in_the_ordinary_way(tmp_path: Path) -> None:
    ended = run(FORK, folder=tmp_path)
    assert ended.returncode == 0, ended.output
    assert "the fork ended with 5" in ended.output


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("as usual", "finalised"),
        ("closed", "finalised"),
        ("told not to", "not yet"),
        ("mpi4py first", "not yet"),  # mpi4py does it, after everything of Python's
    ],
)
def test_mpi_is_finalised_by_whoever_has_started_it(
    how: str, said: str, ranks: int, tmp_path: Path
) -> None:
    ended = run(WHO, how, folder=tmp_path, ranks=ranks)
    assert ended.returncode == 0, ended.output
    assert ended.output.splitlines().count(said) == ranks, ended.output


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "how", [["ends"], ["as a library"], ["as a library", "looks on"], ["leaves"]]
)
def test_a_script_that_ends_mpi_by_itself_ends_well(
    how: list[str], ranks: int, tmp_path: Path
) -> None:
    ended = run(BY_ITSELF, *how, folder=tmp_path, ranks=ranks)
    assert ended.returncode == 0, ended.output
    told = ended.output.count("the program has called MPI.Finalize()")
    assert told == (ranks if "as a library" in how else 0), ended.output


def test_a_script_that_ends_mpi_after_its_last_step_has_taken_it(tmp_path: Path) -> None:
    ended = run(TRAINS, "ends", folder=tmp_path)
    assert ended.returncode == 0 and "has called MPI.Finalize()" not in ended.output, ended.output
    sums = [line for line in ended.output.splitlines() if line.startswith("the sum is")]
    assert len(sums) == 2 and len(set(sums)) == 1, ended.output


@pytest.mark.parametrize("progress", ["polls", "by a thread"])
@pytest.mark.parametrize(
    ("how", "words"),
    [("trains on", "after its world was closed"), ("one alone", "has ended after 1 backprops")],
)
def test_training_on_after_mpi_has_ended_is_an_error_with_the_cause(
    how: str, words: str, progress: str, tmp_path: Path
) -> None:
    ended = run(TRAINS, how, progress, folder=tmp_path)
    assert ended.returncode != 0 and not ended.timed_out, ended.output
    assert words in ended.output, ended.output


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_has_failed_before_a_script_ends_mpi_by_itself_is_told(
    ranks: int, tmp_path: Path
) -> None:
    ended = run(BY_ITSELF, "fails", folder=tmp_path, ranks=ranks)
    assert ended.returncode != 0, ended.output
    assert "the last step is lost" in ended.output


@pytest.mark.parametrize("who", ["all", "root"])
def test_a_script_at_whose_end_ranks_exit_with_a_status_ends_with_it(
    who: str, tmp_path: Path
) -> None:
    ended = run(EXIT, who, folder=tmp_path)
    assert ended.returncode == 3 and "[rank " not in ended.output, ended.output


def test_a_rank_that_ends_mpi_in_an_exit_handler_ends_the_job_with_its_status(
    tmp_path: Path,
) -> None:
    ended = run(EXIT, "a handler", folder=tmp_path)
    assert ended.returncode == 3 and "with exit status 3" in ended.output, ended.output


def test_a_process_outside_its_launchers_world_ends_though_mpi_does_not(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ALONE],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=clean_environment() | {"SLURM_STEP_NUM_TASKS": "2", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    assert ended.returncode == 3, ended.stderr
    assert "[launcher-mismatch]" in ended.stderr
    assert "gave up after waiting 4 s for MPI's finalisation" in ended.stderr


@pytest.mark.parametrize(
    ("variables", "codes"),
    [
        # MPICH ends the process in MPI_Init; Open MPI starts a world of one.
        ({"PMI_FD": "77", "PMI_SIZE": "2"}, ["[mpi-not-started]", "[launcher-mismatch]"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["[launcher-mismatch]"]),
    ],
)
@pytest.mark.parametrize("command", [["-c", "import dearmpi; dearmpi.connect()"], DOCTOR])
def test_a_process_whose_launcher_is_not_there_ends_with_a_code_and_no_trace(
    command: list[str], variables: dict[str, str], codes: list[str], tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=clean_environment() | variables | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 3, output
    assert sum(output.count(code) for code in codes) == 1 and "Traceback" not in output, output
