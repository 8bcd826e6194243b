"""Deadline: it ends a process that waits too long, and no other."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading
from dearmpi.comm.deadline import Deadline

deadline = Deadline(0.2, complaint="waited in vain")
print("unflushed", end="")
{body}
"""


@pytest.mark.parametrize(
    ("body", "code", "complaint"),
    [
        ("with deadline: threading.Event().wait()", 8, "waited in vain\n"),
        ("sys.stdout.close()\nwith deadline: threading.Event().wait()", 8, "waited in vain\n"),
        # What comes before and after may take as long as it likes.
        ("with deadline: pass\nthreading.Event().wait(0.5)\nsys.exit(3)", 3, ""),
        ("threading.Event().wait(0.5)\nwith deadline: pass\nsys.exit(3)", 3, ""),
    ],
)
def test_it_ends_the_process_unless_it_is_met(body: str, code: int, complaint: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(body=body)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (code, "unflushed")
    assert ended.stderr.startswith(complaint) and bool(ended.stderr) == bool(complaint)
