"""The command line where torch and mpi4py cannot be imported, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dearmpi

_SCRIPT = """
import sys

sys.modules["mpi4py"] = sys.modules["torch"] = None  # importing them would fail
from dearmpi.cli.main import main

code = main(sys.argv[1:])
"""


def run_bare(*arguments: str, then: str = "") -> str:
    """What ``dear-train ARGUMENTS`` prints; it must succeed. then: code that runs afterwards."""
    ended = subprocess.run(
        [sys.executable, "-c", f"{_SCRIPT}{then}\nsys.exit(code)\n", *arguments],
        cwd=Path(dearmpi.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
