"""Fingerprints: short hashes of what all ranks must have in common, compared at start."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import dearmpi
from dearmpi.comm.messages.ranks import first_difference, name_ranks
from dearmpi.errors import MismatchError
from dearmpi.train.ranks.agreement import TextWorld
from dearmpi.train.tasks.task import Task

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


def code_fingerprint(folder: Path = Path(dearmpi.__file__).parent) -> str:
    """Return dearmpi's version and a hash of all Python sources in ``folder``."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        source = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{len(source)}\0".encode())
        digest.update(source)
    return f"{dearmpi.__version__}+{digest.hexdigest()[:NUM_DIGITS]}"


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
    samples = f"{len(task.train_data)} and {held_out} held out"
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
