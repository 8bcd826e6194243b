"""Optimizer state by parameter name, so that it fits any order of construction and world size.

torch numbers parameters through all param groups: index i of a ``state_dict()`` is the i-th
parameter when the groups' parameters are read one after the other. ``names`` lists the parameters'
names in that order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from dearmpi.errors import CheckpointError, UsageError
from dearmpi.train.checkpoint.snapshot import Snapshot, StateValue


def parameter_names(model: nn.Module, param_groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the parameters in ``param_groups``, in torch's index order.

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
                    "is not the model's; build the optimizer from model.parameters()"
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
            f"the optimizer has {num_parameters} parameters, {len(set(names))} names were given; "
            "each parameter needs a name of its own"
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
            f"the checkpoint of step {snapshot.step} divides the parameters otherwise into "
            f"{len(groups)} param groups: {names[order[stray]]} where the optimizer has "
            f"{names[stray]}; build the groups as in the run that wrote it"
        )
    state = {index_of[name]: dict(values) for name, values in snapshot.optimizer.items()}
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _check_names(snapshot: Snapshot, index_of: Mapping[str, int]) -> None:
    stored = {name for group in snapshot.groups for name in group["params"]}
    missing = sorted(index_of.keys() - stored)
    unknown = sorted((stored | snapshot.optimizer.keys()) - index_of.keys())
    if missing or unknown:
        raise CheckpointError(
            f"the checkpoint of step {snapshot.step} belongs to another optimizer: "
            f"{len(missing)} parameters are missing in it {missing[:3]}, "
            f"{len(unknown)} are not the optimizer's {unknown[:3]}; "
            "train with the task and options it was written with"
        )
