"""A job that fails ends with the status of its own error and says that error last.

A handler of C's exit() that ends its process by a signal stands for torch's, which destroy what
other threads compute with. ``benchmarks/failing_jobs.py`` has torch, other kinds and hundreds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import dearmpi
from tests.forks import forked
from tests.job import Ended, run_job

ROOT = Path(dearmpi.__file__).parents[1]
pytestmark = pytest.mark.ranks(1)  # each test starts ranks of its own

SCRIPT = """
import ctypes, signal, sys
import dearmpi

how = sys.argv[1]
world = dearmpi.connect()
libc = ctypes.CDLL(None)
libc.on_exit(libc.abort, None)
world.barrier()
is_last = world.rank == world.size - 1
if how == "all" or how == "one" and is_last:
    raise ValueError("a wrong turn")
if how == "interrupt" and is_last:
    raise KeyboardInterrupt
if how == "dear":
    world.all_reduce([1.0], "mistaken")
if how == "exit" and is_last:
    sys.exit(3)
if how == "system exit" and is_last:
    raise SystemExit(3)
if how == "alarm" and is_last:

    def raise_in_the_report(number, frame):
        raise RuntimeError("an alarm")

    class Alarming(ValueError):
        def __str__(self):
            signal.raise_signal(signal.SIGALRM)
            return "a wrong turn"

    signal.signal(signal.SIGALRM, raise_in_the_report)
    raise Alarming
if how == "wordless" and is_last:
    raise type("Wordless", (Exception,), {"__str__": lambda self: 1 / 0})
if how == "own hook" and is_last:
    sys.excepthook = lambda kind, error, trace: print("a hook of the script")
    raise ValueError("a wrong turn")
if how == "closed" and is_last:
    try:
        raise ValueError("a wrong turn")
    finally:
        world.close()
if how == "closed exit" and is_last:
    world.close()
    sys.exit(3)
if how == "abort" and is_last:
    world.abort(7)
if how == "abort in a thread" and is_last:
    import io, threading, time

    is_ending = threading.Event()

    class Slow(io.StringIO):
        def flush(self):
            if threading.current_thread() is not threading.main_thread():
                is_ending.set()
                time.sleep(1)  # in which the program ends, on this rank and on the others

    sys.stdout = Slow()
    threading.Thread(target=world.abort, args=(7,), daemon=True).start()
    is_ending.wait()
    sys.exit(0)
if how == "abort after the end" and is_last:
    import atexit

    world.leave()
    atexit.register(world.abort, 256)
    sys.exit(0)
if how.endswith(("in a thread", "after the end")):
    sys.exit(0)
world.barrier()
"""

INTERRUPTED = """
import os, signal, sys, threading, time
import dearmpi
from dearmpi.comm.process import announced_rank


def interrupt():
    while signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


(when,) = sys.argv[1:]
interrupting = threading.Thread(target=interrupt, daemon=True)
is_first = announced_rank(os.environ) == "0"
if when == "start" and not is_first:
    time.sleep(600)  # never comes
if when == "start":
    interrupting.start()
world = dearmpi.connect()
if when == "end" and not is_first:
    time.sleep(600)
interrupting.start()
"""


def run(how: str, *, ranks: int, folder: Path, script: str = SCRIPT) -> Ended:
    path = folder / "script.py"
    path.write_text(script)
    return run_job(
        forked([sys.executable, path, how]),
        ranks=ranks,
        limit_s=90.0,
        environment={"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize(
    ("how", "ranks", "code", "words"),
    [
        ("one", 2, 1, "ValueError: a wrong turn"),
        ("one", 3, 1, "ValueError: a wrong turn"),
        ("all", 3, 1, "ValueError: a wrong turn"),
        ("all", 4, 1, "ValueError: a wrong turn"),
        ("interrupt", 2, 130, "KeyboardInterrupt"),
        ("dear", 3, 2, "op is 'mistaken'"),
        ("closed", 2, 1, "ValueError: a wrong turn"),
        ("closed exit", 3, 3, ""),
        ("abort", 2, 7, ""),
        ("abort in a thread", 2, 7, ""),
        ("abort in a thread", 3, 7, ""),
        ("abort after the end", 2, 1, ""),
        ("exit", 3, 3, "rank 2 has ended with exit status 3"),
        ("system exit", 2, 3, "rank 1 has ended with exit status 3"),
        ("system exit", 4, 3, "rank 3 has ended with exit status 3"),
        ("alarm", 2, 1, "Alarming: a wrong turn"),
        ("wordless", 2, 1, "Wordless: <exception str() failed>"),
        ("own hook", 2, 1, "rank 1 has ended with exit status 1"),
    ],
)
def test_a_job_that_fails_ends_by_its_own_error(
    how: str, ranks: int, code: int, words: str, tmp_path: Path
) -> None:
    ended = run(how, ranks=ranks, folder=tmp_path)
    said = [line for line in ended.output.splitlines() if line.startswith("[rank ")]
    assert ended.returncode == code, ended.output
    told = "\n".join(said) if "has ended" in words else said[-1] if said else ""
    assert words in told if words else not said, ended.output
    assert ended.left_over == 0


def test_an_error_of_ours_begins_with_the_users_own_line(tmp_path: Path) -> None:
    ended = run("dear", ranks=2, folder=tmp_path)
    first = next(line for line in ended.output.splitlines() if line.startswith("[rank "))
    assert "ConfigError" in first and "script.py:16, in <module>: op is 'mistaken'" in first


@pytest.mark.parametrize("when", ["start", "end"])
def test_an_interrupt_ends_a_rank_that_waits_inside_of_mpi(when: str, tmp_path: Path) -> None:
    ended = run(when, ranks=2, folder=tmp_path, script=INTERRUPTED)
    assert ended.returncode != 0 and ended.left_over == 0
    assert "Traceback" not in ended.output and "has waited" not in ended.output
