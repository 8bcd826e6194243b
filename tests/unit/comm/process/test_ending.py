"""How a process ends: at a deadline if it waits too long, and without exit handlers if it fails."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import sys, threading
import dearmpi.comm.process.ending
from dearmpi.comm.process.ending import Deadline
from dearmpi.comm.watchdog.watchdog import StallLimits

deadline = Deadline(StallLimits({limits}), origin="rank 1", what="Godot", advice="look for him")
print("unflushed", end="")
{body}
"""
WARNED = "[rank 1] has waited N s for Godot: look for him\n"
ENDED = "[rank 1] gave up after waiting N s for Godot: look for him\n"


@pytest.mark.parametrize(
    ("limits", "body", "code", "told"),
    [
        ("0.1, 0.2", "with deadline: threading.Event().wait()", 8, WARNED + ENDED),
        ("0.1, 60", "with deadline: threading.Event().wait(3.0)\nsys.exit(3)", 3, WARNED),
        (
            "0.1, 0.2",
            "sys.stdout.close()\nwith deadline: threading.Event().wait()",
            8,
            WARNED + ENDED,
        ),
        ("0.1, 0.2", "sys.stderr.close()\nwith deadline: threading.Event().wait()", 8, ""),
        # What comes before and after may take as long as it likes.
        ("0.3, 0.4", "with deadline: pass\nthreading.Event().wait(0.7)\nsys.exit(3)", 3, ""),
        ("0.3, 0.4", "threading.Event().wait(0.7)\nwith deadline: pass\nsys.exit(3)", 3, ""),
    ],
)
def test_it_warns_then_ends_the_process_unless_it_is_met(
    limits: str, body: str, code: int, told: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(limits=limits, body=body)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (code, "unflushed")
    assert re.sub(r"\d+ s", "N s", ended.stderr) == told


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    """As where a scheduler suspends the job."""
    body = (
        "dearmpi.comm.process.ending._STEP_S = 0.1\n"
        "with deadline:\n    print(' entered', flush=True)\n    sys.stdin.read()\nsys.exit(3)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(limits="2.0, 2.5", body=body)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None and "entered" in process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(3.0)  # longer than the limits, which may not count it
        process.send_signal(signal.SIGCONT)
        _, told = process.communicate("", timeout=30)
    assert (process.returncode, told) == (3, "")


EXITING = """
import ctypes, sys, threading
from dearmpi.comm.process.ending import skip_exit_handlers

libc = ctypes.CDLL(None)
libc.on_exit(libc.abort, None)  # as a library whose end is the process's
if "skip" in sys.argv:
    skip_exit_handlers()
if "thread" in sys.argv:
    thread = threading.Thread(target=libc.exit, args=(5,))
    thread.start()
    thread.join()
libc.exit(5)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries have no on_exit()")
@pytest.mark.parametrize(
    ("how", "code"),
    [([], -signal.SIGABRT), (["skip"], 5), (["skip", "thread"], 5)],
)
def test_handlers_that_would_end_the_process_by_a_signal_are_left_out(
    how: list[str], code: int
) -> None:
    ended = subprocess.run([sys.executable, "-c", EXITING, *how], check=False, timeout=60)
    assert ended.returncode == code


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("sys.exit(3)", 3),
        ("try:\n    sys.exit(3)\nfinally:\n    print('at last', file=sys.stderr)", 3),
        ("sys.exit('no data')", 1),
        ("exit(4)", 4),
        ("sys.exit()", 0),
        ("try:\n    sys.exit(3)\nexcept SystemExit:\n    pass", 0),
        ("try:\n    sys.exit(3)\nexcept SystemExit as error:\n    kept = error", 0),
        ("threading.Thread(target=sys.exit, args=(3,)).start()", 0),
        ("raise ValueError", 0),
    ],
)
def test_the_status_with_which_a_program_ends_is_known_at_its_end(body: str, status: int) -> None:
    script = f"""
import atexit, sys, threading
from dearmpi.comm.process.ending import exit_status, note_exit_status

note_exit_status()
atexit.register(lambda: print(exit_status()))
{body}
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.stdout == f"{status}\n", ended.stderr
    assert ended.returncode == (status if "Value" not in body else 1)
