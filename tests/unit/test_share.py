from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.share import Share

TESTS = """
import os, sys, time
from pathlib import Path
import pytest

HERE = Path(__file__).parent
COLLECTED = os.getpid()  # in the first process

@pytest.mark.parametrize("number", range(3))
def test_number(number):
    print("printed by", number)
    (HERE / f"{Path(__file__).stem}-{number}-{os.getpid()}").touch()
    # Until both processes have a file of tests.
    until = time.monotonic() + 60
    while len({path.name.rpartition("-")[2] for path in HERE.glob("test_*-*")}) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
"""
CONFTEST = """
from tests.share import run_shared

def pytest_runtestloop(session):
    run_shared(session, 2)
    return True
"""


def run(folder: Path, *ends: str) -> tuple[int, str]:
    """Three files of three tests each in two processes; a file ends with what ``ends`` adds."""
    (folder / "conftest.py").write_text(CONFTEST)
    for number, end in enumerate([*ends, "", "", ""][:3]):
        (folder / f"test_{number}.py").write_text(TESTS + end)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", str(folder)]
    command += ["--rootdir", str(folder), "-c", str(folder / "none.ini")]
    (folder / "none.ini").write_text("[pytest]\n")
    repository = Path(__file__).resolve().parents[2]
    ended = subprocess.run(
        command, cwd=repository, capture_output=True, text=True, timeout=180, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_each_file_runs_in_the_process_that_comes_to_it_first(tmp_path: Path) -> None:
    first, second = Share(tmp_path), Share(tmp_path)
    assert first.takes("tests/unit/test_a.py") and not second.takes("tests/unit/test_a.py")
    assert second.takes("tests/unit/test_b.py") and not first.takes("tests/unit/test_b.py")
    assert first.takes("tests/unit/test_a.py"), "all tests of a file run in one process"


def test_each_test_runs_once_and_the_first_process_reports_all(tmp_path: Path) -> None:
    fails = "\ndef test_fails():\n    assert 1 == 2, 'told in full'\n"
    fails += "\ndef test_skipped():\n    pytest.skip('not here')\n"
    status, output = run(tmp_path, fails, fails)
    ran = sorted(path.name for path in tmp_path.glob("test_*-*"))
    assert [name.rpartition("-")[0] for name in ran] == [
        f"test_{file}-{number}" for file in range(3) for number in range(3)
    ]
    for file in range(3):
        assert (
            len({name.rpartition("-")[2] for name in ran if name.startswith(f"test_{file}")}) == 1
        )
    assert status == 1 and "2 failed, 9 passed, 2 skipped" in output
    assert output.count("AssertionError: told in full") >= 2
    assert sorted(re.findall(r"printed by (\d)", output)) == sorted("012" * 3)


def test_a_process_that_dies_is_a_failure_that_names_its_test(tmp_path: Path) -> None:
    dies = "\ndef test_dies():\n    if os.getpid() != COLLECTED:\n        os._exit(7)\n"
    status, output = run(tmp_path, dies, dies, dies)
    assert status and "ended with status 7, last in test_" in output and "test_dies" in output
