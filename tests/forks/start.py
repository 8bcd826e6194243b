"""Starts a server of forks for a Python when it is first wanted, or before, for others to share."""

from __future__ import annotations

import atexit
import json
import os
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.roster import is_launched, launched_rank

MARK_VARIABLE = "DEARMPI_TEST_JOB"
SHARED_VARIABLE = "DEARMPI_TEST_FORKS"  # addresses of servers by the path of their Python, as JSON
MARK_LENGTH = 11  # of a mark, in the name of a process, which has 15 characters
_STARTING = threading.Lock()
_CLIENT = Path(__file__).with_name("client.py")
_ROOT = Path(__file__).resolve().parents[2]


def forked(command: Sequence[str | Path]) -> list[str | Path]:
    """What to start in place of ``command``, which is that of a Python: a fork that does the same.

    What is read when Python starts or torch is loaded is the server's: warnings, the seed of
    hashes, the flags of Python.
    """
    python, *arguments = command
    return [*_client(python, _find_server(str(python))), *arguments]


def _client(python: str | Path, address: str) -> list[str | Path]:
    return [python, "-I", "-S", _CLIENT, address]


def python_beside(address: str) -> Path:
    """What a server's forks start as Python, as for workers that load data: forks as well."""
    return Path(address).with_name("python")


def fork_name(environment: Mapping[str, str]) -> str:
    """The name by which the system shows a fork, and what it forks: its job and rank.

    /proc shows the environment of the server for each fork, and so no mark.
    """
    mark = environment.get(MARK_VARIABLE, "").rpartition(",")[2]
    rank = f"{launched_rank(environment):03d}" if is_launched(environment) else "-"
    return f"{mark[:MARK_LENGTH]}.{rank}"


def share_server(python: str | Path) -> None:
    """Start the server of ``python`` for all processes that this one starts."""
    address = _start_server(str(python))
    shared = json.loads(os.environ.get(SHARED_VARIABLE, "{}"))
    os.environ[SHARED_VARIABLE] = json.dumps(shared | {str(python): address})


def _find_server(python: str) -> str:
    """The address of the server that is shared, or of one for this process and its forks."""
    shared: dict[str, str] = json.loads(os.environ.get(SHARED_VARIABLE, "{}"))
    with _STARTING:  # two threads would start two
        return shared.get(python) or _start_server(python)


@cache
def _start_server(python: str) -> str:
    """The address of a server that lives as long as this process."""
    folder = tempfile.TemporaryDirectory(prefix="dear-forks-")
    address = os.path.join(folder.name, "socket")
    path = python_beside(address)
    start = shlex.join(map(str, _client(python, address)))
    path.write_text(f'#!/bin/sh\nexec {start} "$@"\n')
    path.chmod(0o755)
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [python, "-m", "tests.forks.server", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=_ROOT,
        env=environment,
    )

    def end() -> None:
        process.kill()
        process.wait()
        folder.cleanup()

    atexit.register(end)
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise RuntimeError("the server of forks did not start; its error is above")
    return address
