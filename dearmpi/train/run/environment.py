"""Environment: what a run is made of, compared between ranks at start and kept in env.json.

Fingerprints are short hashes of what all ranks must have in common.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dearmpi import version
from dearmpi.comm.api.call import name_ranks
from dearmpi.comm.messages.collective_calls import first_difference
from dearmpi.errors import MismatchError
from dearmpi.train.ranks.agreement import TextWorld
from dearmpi.train.tasks.task import Task, count_samples

NUM_DIGITS = 12
LONGEST_VALUE = 60
MOST_ITEMS = 5

MakeLines = Callable[[], Sequence[str]]

CURES = {
    "code": "install the same dearmpi on every host",
    "argument": "start every rank with the same command line, environment and config file",
    "data": "give every rank the same files, complete on every host",
    "model": "give every rank the same task, data and seed",
}


def code_fingerprint(folder: Path = Path(version.__file__).parent) -> str:
    """Return dearmpi's version and a hash of all Python sources in ``folder``."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        source = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{len(source)}\0".encode())
        digest.update(source)
    return f"{version.__version__}+{digest.hexdigest()[:NUM_DIGITS]}"


def argument_fingerprints(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return one item for each argument: its value, hashed where it is long.

    The items are called ``argument NAME``, so that a difference names the argument.
    """
    return {f"argument {name}": _show(value) for name, value in arguments.items()}


def model_fingerprints(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the items ``model shapes`` (names, shapes, dtypes) and ``model values``."""
    shapes, values = hashlib.sha256(), hashlib.sha256()
    for line in _describe_shapes(state):
        shapes.update(f"{line}\n".encode())
    for tensor in state.values():
        values.update(_bytes_of(tensor))
    return {
        "model shapes": shapes.hexdigest()[:NUM_DIGITS],
        "model values": values.hexdigest()[:NUM_DIGITS],
    }


def model_lines(state: Mapping[str, Tensor]) -> dict[str, MakeLines]:
    """Return functions that make the lines behind the items of ``model_fingerprints``. Of these
    lines the first that differs is reported.
    """
    return {
        "model shapes": lambda: _describe_shapes(state),
        "model values": lambda: [
            f"{name} (hash {hashlib.sha256(_bytes_of(tensor)).hexdigest()[:NUM_DIGITS]})"
            for name, tensor in state.items()
        ],
    }


def _describe_shapes(state: Mapping[str, Tensor]) -> list[str]:
    return [
        f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in state.items()
    ]


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def data_fingerprints(task: Task) -> dict[str, str]:
    """Return the items ``data samples``, their number, and ``data contents``, the task's digest. A
    rank with other data would train on other shares of each step.
    """
    held_out = 0 if task.eval_data is None else len(task.eval_data)
    samples = f"{count_samples(task.train_data)} and {held_out} held out"
    return {"data samples": samples, "data contents": task.data_digest}


def compare(
    world: TextWorld,
    fingerprints: Mapping[str, str],
    lines: Mapping[str, MakeLines] = MappingProxyType({}),
) -> None:
    """Raise MismatchError on every rank, with every value and its ranks, unless all ranks have
    equal ``fingerprints``. Collective: every rank must call it.

    lines: makes what a hash stands for, which is looked at only where that differs.
    """
    own = json.dumps({"host": world.host, "items": dict(fingerprints)})
    gathered = [json.loads(text) for text in world.all_gather_text(own)]
    hosts = [entry["host"] for entry in gathered]
    names = dict.fromkeys(name for entry in gathered for name in entry["items"])
    differing: dict[str, dict[str, list[int]]] = {}
    for name in names:
        values = [entry["items"].get(name, "absent") for entry in gathered]
        if len(set(values)) > 1:
            if name in lines:
                values = first_difference(lines[name](), world.all_gather_text) or values
            differing[name] = _by_value(values)
    if differing:
        raise MismatchError(_explain(differing, hosts), code="ranks-built-differently")


def _by_value(values: Sequence[str]) -> dict[str, list[int]]:
    """The ranks that reported each value."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[value].append(rank)
    return ranks


def _explain(differing: Mapping[str, Mapping[str, list[int]]], hosts: Sequence[str]) -> str:
    lines = [
        f"{name} differs: "
        + "; ".join(f"{value} on {name_ranks(ranks, hosts)}" for value, ranks in by_value.items())
        for name, by_value in list(differing.items())[:MOST_ITEMS]
    ]
    if len(differing) > MOST_ITEMS:
        lines.append(f"and {len(differing) - MOST_ITEMS} more items")
    cures = dict.fromkeys(CURES.get(name.split()[0], "make them equal") for name in differing)
    return "\n".join([*lines, *(f"To cure it, {cure}." for cure in cures)])


def _show(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    if len(text) <= LONGEST_VALUE:
        return text
    return f"{text[:20]}... (hash {hashlib.sha256(text.encode()).hexdigest()[:NUM_DIGITS]})"


# Variables that say which job this was; the others may hold secrets.
JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PBS_JOBID", "LSB_JOBID")


def describe_environment(
    *,
    world_size: int,
    hosts: Sequence[str],
    command: Sequence[str],
    folder: Path,
    threads_reason: str,
    units: Mapping[str, str | float] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Return plain data about this run.

    hosts: the host of each rank. command: the command line.
    folder: the user's working folder, whose git commit is noted if it has one. threads_reason: why
    torch has as many threads as it has. units: what people read instead of samples and loss.
    """
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "working_folder": str(folder),
        "git_commit": git_commit(folder),
        "world_size": world_size,
        "hosts": list(hosts),
        "mpi_library": mpi_library().strip(),
        "versions": {
            "dearmpi": version.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "python": sys.executable,
        "platform": platform.platform(),
        "torch_threads": torch.get_num_threads(),
        "torch_threads_reason": threads_reason,
        "cores": sorted(os.sched_getaffinity(0)),
        **({} if units is None else {"units": dict(units)}),
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


def mpi_library() -> str:
    """Which MPI library is in use, as it names itself."""
    try:
        from dearmpi.comm.backends import mpi
    except (ImportError, RuntimeError):
        return "none"
    return mpi.describe()
