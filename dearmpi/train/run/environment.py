"""Environment: where and with what a run ran, for its env.json."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dearmpi

# Variables that say which job this was; the others may hold secrets.
JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PBS_JOBID", "LSB_JOBID")


def describe_environment(
    *,
    world_size: int,
    hosts: Sequence[str],
    mpi_library: str,
    command: Sequence[str],
    folder: Path,
    threads_reason: str,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Return plain data about this run.

    hosts: the host of each rank. mpi_library: as MPI itself names it. command: the command line.
    folder: the user's working folder, whose git commit is noted if it has one. threads_reason: why
    torch has as many threads as it has.
    """
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "working_folder": str(folder),
        "git_commit": git_commit(folder),
        "world_size": world_size,
        "hosts": list(hosts),
        "mpi_library": mpi_library.strip(),
        "versions": {
            "dearmpi": dearmpi.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "python": sys.executable,
        "platform": platform.platform(),
        "torch_threads": torch.get_num_threads(),
        "torch_threads_reason": threads_reason,
        "cores": sorted(os.sched_getaffinity(0)),
        "job": {name: environ[name] for name in JOB_VARIABLES if name in environ},
    }


def git_commit(folder: Path) -> str | None:
    """Return the commit checked out at ``folder``, None where there is none.

    Reads git's files: starting a process after MPI has been initialised is not safe everywhere.
    """
    try:
        git = _git_folder(folder.resolve())
        if git is None:
            return None
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        return _read_reference(git, head.removeprefix("ref: "))
    except (OSError, UnicodeDecodeError):
        return None


def _git_folder(folder: Path) -> Path | None:
    for parent in (folder, *folder.parents):
        git = parent / ".git"
        if git.is_dir():
            return git
        if git.is_file():  # a worktree or a submodule
            return parent / git.read_text().strip().removeprefix("gitdir: ")
    return None


def _read_reference(git: Path, name: str) -> str | None:
    shared = git / "commondir"
    common = git / shared.read_text().strip() if shared.exists() else git
    for place in (git / name, common / name):
        if place.exists():
            return place.read_text().strip()
    packed = common / "packed-refs"
    if packed.exists():
        for line in packed.read_text().splitlines():
            commit, _, reference = line.partition(" ")
            if reference == name:
                return commit
    return None
