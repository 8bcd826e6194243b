"""Snapshot: everything that a run needs to go on, by name and free of any world size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dearmpi.errors import CheckpointError
from dearmpi.train.checkpoint.tensor_file import find_aliases

MOST_DIFFERENCES = 5

StateValue = Tensor | float | int | bool | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run after ``step`` optimizer steps.

    model: the model's state dict.
    optimizer: by parameter name, the optimizer's state of that parameter.
    groups: options of each param group, with the list of its parameter names as ``params``.
    meta: plain data (numbers, text, None; tuples, lists and mappings of them).
    random: by rank, the states of its random number generators.
    """

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, dict[str, StateValue]]
    groups: list[dict[str, Any]]
    meta: dict[str, Any]
    random: list[dict[str, Any]] = field(default_factory=list)


def check_model(snapshot: Snapshot, model_state: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError, with the first differences, unless the snapshot fits the model.

    model_state: the state dict of the model that is to be loaded. Names, shapes and dtypes must be
    equal, and tensors that are tied in the model must be equal in the snapshot.
    """
    differences = [
        *_compare_tensors(snapshot.model, model_state),
        *_compare_ties(snapshot.model, model_state),
    ]
    if not differences:
        return
    shown = differences[:MOST_DIFFERENCES]
    if len(differences) > len(shown):
        shown.append(f"and {len(differences) - len(shown)} more")
    raise CheckpointError(
        f"the checkpoint of step {snapshot.step} belongs to another model: {'; '.join(shown)}; "
        "train with the task and options it was written with, or start a new run"
    )


def _compare_tensors(stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    differences = []
    for name, tensor in wanted.items():
        other = stored.get(name)
        if other is None:
            differences.append(f"{name} is missing in the checkpoint")
        elif other.shape != tensor.shape:
            differences.append(
                f"{name} is {tuple(other.shape)} in the checkpoint, "
                f"{tuple(tensor.shape)} in the model"
            )
        elif other.dtype != tensor.dtype:
            differences.append(
                f"{name} is {other.dtype} in the checkpoint, {tensor.dtype} in the model"
            )
    unknown = [f"{name} is not in the model" for name in stored if name not in wanted]
    return differences + unknown


def _compare_ties(stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Loading two different tensors into one would silently keep the last."""
    return [
        f"{name} and {owner} are one tensor in the model, two in the checkpoint"
        for name, owner in find_aliases(wanted).items()
        if name in stored and owner in stored and not _same_bits(stored[name], stored[owner])
    ]


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left is right:
        return True
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    # Bytes, so that NaN equals itself.
    left_bytes = left.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    right_bytes = right.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return torch.equal(left_bytes, right_bytes)
