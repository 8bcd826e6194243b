"""The tests of all ranks end in time and say what happened, however one of them goes wrong."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.job import Job, clean_environment, run_job
from tests.roster import Entry

TESTS = Path(__file__).resolve().parent.parent
HARNESS = (
    "conftest.py",
    "forks",
    "job.py",
    "launch.py",
    "roster.py",
    "selection.py",
    "share.py",
    "trials.py",
)

Plant = Callable[[str], Path]
pytestmark = pytest.mark.ranks(1)  # each test starts ranks of its own


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """Make a project with this harness and one file of tests of all ranks; its root."""

    def make(test: str) -> Path:
        (tmp_path / "tests" / "mpi").mkdir(parents=True)
        for name in HARNESS:
            copy = shutil.copytree if (TESTS / name).is_dir() else shutil.copy
            copy(TESTS / name, tmp_path / "tests" / name)
        shutil.copy(TESTS.parent / "setup.cfg", tmp_path)
        head = "import os, time\nfrom mpi4py import MPI\ncomm = MPI.COMM_WORLD\n"
        (tmp_path / "tests" / "mpi" / "test_planted.py").write_text(head + test)
        return tmp_path

    return make


def launch(
    root: Path, *, ranks: int, test_limit_s: int = 60, patience_s: int = 30
) -> subprocess.CompletedProcess[str]:
    """Run the planted tests as bin/test does."""
    command = [sys.executable, "tests/launch.py", "--ranks", str(ranks)]
    return subprocess.run(
        [*command, "--test-limit", str(test_limit_s), "--end-limit", "4"],
        cwd=root,
        env=clean_environment() | {"DEARMPI_TEST_PATIENCE_S": str(patience_s), "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
        check=False,
    )


def living(root: Path) -> list[str]:
    """Command lines of processes that work in ``root``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd") == str(root):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def test_ranks_that_agree_pass_and_rank_0_alone_reports(plant: Plant) -> None:
    ended = launch(plant("def test_sum(): assert comm.allreduce(1) == 3\n"), ranks=3)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("1 passed") == 1


def test_ranks_without_a_file_run_the_covering_set_and_the_unit_tests(plant: Plant) -> None:
    root = plant("def test_not_covering(): pass\n")
    (root / "tests" / "unit").mkdir()
    (root / "tests" / "mpi" / "test_join.py").write_text("def test_covering(): pass\n")
    (root / "tests" / "unit" / "test_unit.py").write_text("def test_unit(): pass\n")
    (root / "tests" / "test_job.py").write_text("def test_job(): pass\n")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    ended = run_job(command, ranks=3, limit_s=90, folder=root)
    assert ended.returncode == 0, ended.output
    assert "test_covering PASSED" in ended.output and "test_not_covering" not in ended.output
    assert ended.output.count("1 passed") == 2, "the unit test, in a process of its own"


def test_a_unit_test_that_fails_fails_ranks_without_a_file(plant: Plant) -> None:
    root = plant("def test_not_covering(): pass\n")
    (root / "tests" / "unit").mkdir()
    (root / "tests" / "mpi" / "test_join.py").write_text("def test_covering(): pass\n")
    (root / "tests" / "unit" / "test_unit.py").write_text("def test_unit(): assert False\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    ended = run_job(command, ranks=2, limit_s=90, folder=root)
    assert ended.returncode == 1 and "1 failed" in ended.output


def test_a_deadlock_ends_with_the_stacks_of_all_ranks(plant: Plant) -> None:
    root = plant("def test_stuck():\n    if comm.rank != 1:\n        comm.recv(source=1)\n")
    ended = launch(root, ranks=3, test_limit_s=4)
    assert ended.returncode == 124, ended.stdout
    assert "TIMEOUT on 3 ranks" in ended.stdout
    for rank in range(3):
        assert f"--- rank {rank} (process" in ended.stdout
    assert ended.stdout.count("line 6 in test_stuck") == 2
    assert not living(root)


def test_a_failure_on_one_rank_ends_ranks_that_wait_for_it(plant: Plant) -> None:
    root = plant(
        "def test_odd():\n    comm.barrier()\n    assert comm.rank != 1, 'odd one out'\n"
        "    comm.barrier()\n"
    )
    ended = launch(root, ranks=2, patience_s=1)
    assert ended.returncode not in (0, 124), ended.stdout
    assert "[rank 1] E       AssertionError: odd one out" in ended.stdout
    assert "still inside the test: rank 0" in ended.stdout
    assert "line 7 in test_odd" in ended.stdout
    assert not living(root)


def test_a_failure_on_one_rank_fails_the_test_on_all_and_the_next_one_runs(plant: Plant) -> None:
    root = plant(
        "def test_odd():\n    comm.barrier()\n    assert comm.rank != 1\n"
        "def test_next(): assert comm.allreduce(1) == 2\n"
    )
    ended = launch(root, ranks=2)
    assert ended.returncode == 1, ended.stdout
    assert "test_odd - failed on rank 1, passed here" in ended.stdout
    assert "2 passed, 1 error" in ended.stdout


@pytest.mark.parametrize("before", ["", "os.fork() or time.sleep(50)\n        "])
def test_a_rank_that_dies_ends_the_job(before: str, plant: Plant) -> None:
    """Also where a child of it lives on, so that the launcher does not notice."""
    dies = f"    if comm.rank:\n        {before}os._exit(3)\n"
    root = plant(f"def test_dies():\n{dies}    comm.barrier()\n")
    ended = launch(root, ranks=2)
    assert ended.returncode not in (0, 124), ended.stdout
    assert "rank 1 ended in tests/mpi/test_planted.py::test_dies" in ended.stdout
    assert not living(root)


def test_a_process_that_its_parent_has_not_waited_for_is_gone() -> None:
    process = subprocess.Popen(["sleep", "60"])
    entry = Entry(rank=0, size=1, pid=process.pid)
    assert not entry.is_gone()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert entry.is_gone()
    process.wait()
    assert entry.is_gone()


def test_a_rank_that_cannot_collect_ends_the_job(plant: Plant) -> None:
    root = plant("assert comm.rank == 0, 'not here'\ndef test_sum(): comm.allreduce(1)\n")
    ended = launch(root, ranks=2)
    assert ended.returncode not in (0, 124), ended.stdout
    assert "[rank 1] E   AssertionError: not here" in ended.stdout
    assert not living(root)


def test_a_job_past_its_limit_is_killed_with_all_its_ranks(tmp_path: Path) -> None:
    ended = run_job(["sleep", "600"], ranks=2, limit_s=2, folder=tmp_path)
    assert ended.timed_out and ended.returncode == 124
    assert not living(tmp_path)


def test_a_job_tells_the_processes_of_its_ranks(tmp_path: Path) -> None:
    # In one piece: what is printed unbuffered may have another rank's words in between.
    says = "os.write(1, b'rank %d\\n' % int(os.environ['PMI_RANK']))"
    script = f"import os, time; {says}; time.sleep(600)"
    with Job([sys.executable, "-c", script], ranks=3, limit_s=90.0, folder=tmp_path) as job:
        assert all(job.wait_for(f"rank {rank}", timeout_s=60) for rank in range(3))
        assert sorted(job.rank_pids()) == [0, 1, 2]
        job.signal_rank(1, signal.SIGKILL)
        ended = job.wait()
    assert ended.returncode != 0 and not ended.timed_out
    assert not living(tmp_path)
