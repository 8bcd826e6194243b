"""Snapshot: everything that a run needs to go on, by name and free of any world size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dearmpi.errors import CheckpointError, UsageError

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


def find_aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each name whose tensor is the same memory as an earlier one's to that earlier name."""
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        owner = first.setdefault(place, name)
        if owner != name:
            aliases[name] = owner
    return aliases


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
        "train with the task and options that wrote it, or start a new run",
        code="checkpoint-of-other-model",
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


def parameter_names(model: nn.Module, param_groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the parameters in ``param_groups``, in torch's index order.

    torch numbers parameters through all groups: index i of a ``state_dict()`` is the i-th parameter
    when the groups are read one after the other.

    Raises UsageError for a parameter that is not the model's.
    """
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    names = []
    for number, group in enumerate(param_groups):
        for parameter in group["params"]:
            name = by_id.get(id(parameter))
            if name is None:
                raise UsageError(
                    f"param group {number} has a parameter of shape {tuple(parameter.shape)} that "
                    "is not the model's; build the optimizer from model.parameters()",
                    code="parameters-not-in-model",
                )
            names.append(name)
    return names


def optimizer_by_name(
    state_dict: Mapping[str, Any], names: Sequence[str]
) -> tuple[dict[str, dict[str, StateValue]], list[dict[str, Any]]]:
    """Turn torch's ``state_dict`` into (state by parameter name, groups that list names).

    Parameters without state, such as frozen ones, have no entry. Raises UsageError when ``names``
    and the state dict do not have the same number of parameters.
    """
    num_parameters = sum(len(group["params"]) for group in state_dict["param_groups"])
    if num_parameters != len(names) or len(set(names)) != len(names):
        raise UsageError(
            f"the optimizer has {num_parameters} parameters, but {len(set(names))} different "
            "names were given; give each parameter its own name",
            code="parameters-not-in-model",
        )
    optimizer = {names[index]: dict(state) for index, state in state_dict["state"].items()}
    groups = [
        {
            # torch keeps its own list of names; ours is the one that is checked.
            **{key: value for key, value in group.items() if key != "param_names"},
            "params": [names[index] for index in group["params"]],
        }
        for group in state_dict["param_groups"]
    ]
    return optimizer, groups


def optimizer_state_dict(snapshot: Snapshot, names: Sequence[str]) -> dict[str, Any]:
    """Return the snapshot's optimizer state in torch's format, for parameters called ``names``.

    Raises CheckpointError when the parameters differ, or are divided otherwise into groups.
    """
    index_of = {name: index for index, name in enumerate(names)}
    _check_names(snapshot, index_of)
    groups = [
        {**group, "params": sorted(index_of[name] for name in group["params"])}
        for group in snapshot.groups
    ]
    # torch matches groups by position alone, so an index that strays would land elsewhere.
    order = [index for group in groups for index in group["params"]]
    if order != list(range(len(names))):
        stray = next(i for i, index in enumerate(order) if i != index)
        raise CheckpointError(
            f"the checkpoint of step {snapshot.step} has other members in its {len(groups)} "
            f"param groups: {names[order[stray]]} where the optimizer has {names[stray]}; "
            "build the groups as in the run that wrote it",
            code="checkpoint-of-other-model",
        )
    state = {index_of[name]: dict(values) for name, values in snapshot.optimizer.items()}
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _check_names(snapshot: Snapshot, index_of: Mapping[str, int]) -> None:
    stored = {name for group in snapshot.groups for name in group["params"]}
    missing = sorted(index_of.keys() - stored)
    unknown = sorted((stored | snapshot.optimizer.keys()) - index_of.keys())
    if missing or unknown:
        raise CheckpointError(
            f"the checkpoint of step {snapshot.step} belongs to another optimizer: it lacks "
            f"{len(missing)} parameters {missing[:3]} and has {len(unknown)} others "
            f"{unknown[:3]}; train with the task and options that wrote it",
            code="checkpoint-of-other-model",
        )
