"""Rank state: what each rank has of its own, as pieces of a checkpoint that holds all ranks'.

An entry of a parameter's state is called after the rank that has it, such as ``rank3.exp_avg``;
``rank3.values`` is the parameter itself, ``rank3.own.correction`` what an algorithm keeps besides.
``rank0.own.unrounded`` is what ranks share of a half-precision parameter, in fp32.
Those of the outer optimizer are ``outer.``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dearmpi.engine.bucket.buffers import flattened, is_dense
from dearmpi.engine.state.sharded_state import LocalState, StatePiece

UNROUNDED = "unrounded"
_VALUES, _OWN, _OUTER = "values", "own.", "outer."
Entries = Mapping[str, Any]


def pieces_of_rank(
    params: Mapping[str, nn.Parameter],
    state: Mapping[Tensor, Entries],
    own: Mapping[str, Mapping[str, Tensor]],
    *,
    rank: int,
) -> list[StatePiece]:
    """The values of ``params``, the inner optimizer's ``state``, and by a parameter's name what
    else it has of its ``own``, as those of ``rank``.
    """
    pieces = []
    for name, param in params.items():
        tensors = {_VALUES: flattened(param.detach())}
        scalars: dict[str, Any] = {}
        further = {_OWN + key: value for key, value in own.get(name, {}).items()}
        for key, value in {**state.get(param, {}), **further}.items():
            if isinstance(value, Tensor) and _is_like(value, param):
                tensors[key] = flattened(value)
            else:
                scalars[key] = value
        pieces.append(
            StatePiece(
                name,
                param,
                0,
                {f"rank{rank}.{key}": value for key, value in tensors.items()},
                {f"rank{rank}.{key}": value for key, value in scalars.items()},
            )
        )
    return pieces


def pieces_of_outer(outer: LocalState) -> list[StatePiece]:
    """This rank's share of the outer optimizer's state; with ``gather="gradients"`` none is."""
    return [
        replace(
            piece,
            tensors={_OUTER + key: value for key, value in piece.tensors.items()},
            scalars={_OUTER + key: value for key, value in piece.scalars.items()},
        )
        for piece in outer.pieces
    ]


def as_outer(state: Mapping[str, Entries]) -> dict[str, dict[str, Any]]:
    """State of the outer optimizer by parameter, with entries called so."""
    return {
        name: {_OUTER + key: value for key, value in entries.items()}
        for name, entries in state.items()
    }


def outer_entries(entries: Entries) -> dict[str, Any]:
    """The outer optimizer's of a parameter's entries."""
    return _under(entries, _OUTER)


def has_ranks(state: Mapping[Any, Entries]) -> bool:
    """Whether a state is of ranks that trained alone, and not of averaged gradients."""
    return any(f"rank0.{_VALUES}" in entries for entries in state.values())


def join_entries(
    saved: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    trained: Mapping[str, nn.Parameter],
    *,
    rank: int,
    size: int,
    is_own: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inner optimizer's state in torch's form, and the rest by name, of what ``size`` ranks
    have saved. The names are ``parameters``, what else a rank has of its ``own``, the ``outer``
    optimizer's state and ``unrounded`` shared values.

    is_own: they are those of ``rank``; else the mean of all.
    """
    if not has_ranks(saved["state"]):
        return dict(saved), {"parameters": {}, "own": {}, "outer": {}, "unrounded": {}}
    names = {id(param): name for name, param in trained.items()}
    places = {name: place for place, name in enumerate(trained)}
    params = [param for group in groups for param in group["params"]]
    inner: dict[int, Any] = {}
    local: dict[str, dict[Any, Any]] = {
        "parameters": {},
        "own": {},
        "outer": {},
        "unrounded": {},
    }
    for index, entries in saved["state"].items():
        name = names[id(params[index])]
        values, own = own_entries(entries, rank if is_own else 0)
        local["own"][name] = _under(entries, f"rank{rank}.{_OWN}")
        if found := own if is_own else mean_entries(entries, size):
            inner[index] = found
        if values is not None:
            local["parameters"][name] = values
        if (shared := entries.get(f"rank0.{_OWN}{UNROUNDED}")) is not None:
            local["unrounded"][name] = shared
        if outer := outer_entries(entries):
            local["outer"][places[name]] = outer
    return {**saved, "state": inner}, local


def own_entries(entries: Entries, rank: int) -> tuple[Tensor | None, dict[str, Any]]:
    """The values of a parameter and the inner optimizer's state, as ``rank`` had them."""
    own = _under(entries, f"rank{rank}.")
    inner = {key: value for key, value in own.items() if not key.startswith(_OWN)}
    return inner.pop(_VALUES, None), inner


def mean_entries(entries: Entries, size: int) -> dict[str, Any]:
    """The mean of the inner optimizer's state over those of ``size`` ranks that have it; of what
    has no mean, the first one's.
    """
    of_ranks = [own_entries(entries, rank)[1] for rank in range(size)]
    keys = dict.fromkeys(key for one in of_ranks for key in one)
    return {key: _mean([one[key] for one in of_ranks if key in one]) for key in keys}


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor) and (first.is_floating_point() or first.is_complex()):
        return torch.stack(list(values)).mean(0)
    return first


def _under(entries: Entries, prefix: str) -> dict[str, Any]:
    return {
        key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)
    }


def _is_like(value: Tensor, param: Tensor) -> bool:
    same = value.shape == param.shape and value.stride() == param.stride()
    return same and is_dense(param) and param.dim() > 0
