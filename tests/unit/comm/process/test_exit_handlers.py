"""A process that fails runs no handlers of C's exit()."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, sys, threading
from dearmpi.comm.process.exit_handlers import skip_exit_handlers

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
    ended = subprocess.run([sys.executable, "-c", SCRIPT, *how], check=False, timeout=60)
    assert ended.returncode == code
