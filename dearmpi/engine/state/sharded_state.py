"""The optimizer's state in the buckets' updates: a rank's part of it, all of it, and loading it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dearmpi.comm.world import World
from dearmpi.engine.bucket.buffers import flattened, shaped_like
from dearmpi.engine.state.owned_state import State, gather_owned, gather_shards
from dearmpi.engine.update.shard_update import (
    FusedRange,
    ShardUpdate,
    Updates,
    owned_of,
    shards_of,
    wholes_of,
)
from dearmpi.engine.update.update import fit, is_elementwise_tensor
from dearmpi.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class StatePiece:
    """State of neighbouring elements of one parameter, which no other rank holds.

    param: the whole parameter. start: the first element, in the order of a flat buffer.
    tensors: by key, 1-D, one value per element; they change with the next step.
    scalars: by key, what belongs to the parameter as a whole.
    """

    name: str
    param: Tensor
    start: int
    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LocalState:
    """One rank's view of the optimizer's state.

    groups: the param groups as in torch's state dict.
    whole: by parameter name, the state of parameters that is the same on all ranks.
    pieces: this rank's share of all other state, of parameters that may be cut.
    owned: by parameter name, the state of parameters that this rank owns, and no other holds.
    """

    groups: list[dict[str, Any]]
    whole: dict[str, dict[str, Any]]
    pieces: list[StatePiece]
    owned: dict[str, dict[str, Any]] = field(default_factory=dict)


def read_whole(updates: Updates) -> dict[str, dict[str, Any]]:
    """The state that every rank holds, by parameter name."""
    whole: dict[str, dict[str, Any]] = {}
    for update in wholes_of(updates):
        whole.update(update.states())
    return whole


def read_pieces(updates: Sequence[ShardUpdate]) -> list[StatePiece]:
    """The state of the elements that this rank owns."""
    return [piece for update in updates for run in update.runs for piece in _cut_run(update, run)]


def _cut_run(update: ShardUpdate, run: FusedRange) -> list[StatePiece]:
    state = update.state_of(run)
    if not state:
        return []
    tensors = {key: v for key, v in state.items() if is_elementwise_tensor(v, run.values)}
    scalars = {key: value for key, value in state.items() if key not in tensors}
    spec, origin = update.bucket.spec, run.start
    return [
        StatePiece(
            name=spec.names[slot],
            param=update.bucket.params[slot],
            start=start - spec.placements[slot].start,
            tensors={key: value[start - origin : stop - origin] for key, value in tensors.items()},
            scalars=scalars,
        )
        for slot, start, stop in run.pieces
    ]


def gather_state(world: World, updates: Updates) -> dict[str, State]:
    """The whole optimizer state by parameter name, on every rank (collective)."""
    if wholes := wholes_of(updates):
        return _copied(read_whole(wholes))
    owned = owned_of(updates)
    states = gather_owned(world, owned) if owned else {}
    return states | _gather_shards(world, shards_of(updates))


def _copied(states: Mapping[str, State]) -> dict[str, State]:
    """Tensors of their own, which no step changes."""
    return {
        name: {
            k: v.clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in state.items()
        }
        for name, state in states.items()
    }


def _gather_shards(world: World, updates: Sequence[ShardUpdate]) -> dict[str, State]:
    described = [describe(update) for update in updates]
    merged: list[dict[str, dict[str, Any]]] = [{} for _ in updates]
    for text in world.all_gather_text(json.dumps(described)):
        for bucket, names in zip(merged, json.loads(text), strict=True):
            for name, entries in names.items():
                bucket.setdefault(name, {}).update(entries)
    whole: dict[str, State] = {}
    for update, names in zip(updates, merged, strict=True):
        whole.update(_gather_bucket(world, update, names))
    return whole


def load_state(
    updates: Updates,
    states: Mapping[str, State],
    *,
    elementwise: frozenset[str] = frozenset(),
) -> None:
    """Set every bucket's optimizer state from whole states by parameter name.

    ``elementwise``: names of entries with one value per element, which a scalar parameter's shape
    does not show. Raises CheckpointError if a tensor's size fits neither parameter nor scalar.
    """
    shards = shards_of(updates)
    for shard in shards:  # all before the first is changed
        _check_shapes(shard, states, elementwise)
    for update in (*wholes_of(updates), *owned_of(updates)):
        own = _copied({name: states[name] for name in update.names if name in states})
        update.set_states(own, elementwise=elementwise)
    for shard in shards:
        _load_shard(shard, states, elementwise)


def _load_shard(
    update: ShardUpdate, states: Mapping[str, State], elementwise: frozenset[str]
) -> None:
    bucket = update.bucket
    update.split()
    for run in update.runs:
        ((slot, start, stop),) = run.pieces
        placed, param = bucket.spec.placements[slot], bucket.params[slot]
        state = states.get(placed.spec.name, {})
        entries = _spread_scalars(state, elementwise) if param.dim() == 0 else state
        like = param.detach().reshape(1) if param.dim() == 0 else param
        part = _cut_whole(entries, like, start - placed.start, stop - placed.start)
        fitted = {k: fit(v, run.values, elementwise=k in elementwise) for k, v in part.items()}
        update.set_state(run, fitted)
    update.merge()


def describe(update: ShardUpdate) -> dict[str, dict[str, Any]]:
    """Per parameter name and state key: the dtype of a tensor, or a scalar's value."""
    described: dict[str, dict[str, Any]] = {}
    for run in update.runs:
        entries = {
            key: _describe_entry(value, run.values) for key, value in update.state_of(run).items()
        }
        for piece in run.pieces:
            described[update.bucket.spec.names[piece.slot]] = entries
    return described


def _describe_entry(value: Any, values: Tensor) -> dict[str, Any]:
    if is_elementwise_tensor(value, values):
        return {"tensor": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Tensor):
        return {"scalar": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    return {"value": value}


def read_scalar(entry: Mapping[str, Any]) -> Any:
    """What ``describe`` said of an entry that is the same for all elements."""
    if "dtype" in entry:
        return torch.tensor(entry["scalar"], dtype=getattr(torch, entry["dtype"]), device="cpu")
    return entry["value"]


def _gather_bucket(
    world: World, update: ShardUpdate, names: Mapping[str, Mapping[str, Any]]
) -> dict[str, State]:
    bucket = update.bucket
    whole: dict[str, State] = {name: {} for name in names}
    kinds = {
        (key, entry["tensor"])
        for entries in names.values()
        for key, entry in entries.items()
        if "tensor" in entry
    }
    flat = {
        (key, dtype): _gather_flat(world, update, key, getattr(torch, dtype))
        for key, dtype in sorted(kinds)
    }
    for slot, placed in enumerate(bucket.spec.placements):
        for key, entry in names.get(placed.spec.name, {}).items():
            if "tensor" in entry:
                view = shaped_like(bucket.params[slot], flat[key, entry["tensor"]], placed.start)
                value: Any = view.clone()
            else:
                value = read_scalar(entry)
            whole[placed.spec.name][key] = value
    return whole


def _gather_flat(world: World, update: ShardUpdate, key: str, dtype: torch.dtype) -> Tensor:
    """The state tensor ``key`` of the whole bucket, laid out like its flat buffer."""
    flat = torch.zeros(update.bucket.spec.padded_numel, dtype=dtype, device=update.device)
    for run in update.runs:
        value = update.state_of(run).get(key)
        if isinstance(value, Tensor):
            flat[run.start : run.stop] = value
    gather_shards(world, flat, update.bucket.spec.cuts)
    return flat


def _spread_scalars(state: Mapping[str, Any], elementwise: frozenset[str]) -> State:
    """A scalar parameter's state with shape (1,) for what belongs to its one element."""
    return {
        key: value.reshape(1) if isinstance(value, Tensor) and key in elementwise else value
        for key, value in state.items()
    }


def _check_shapes(
    update: ShardUpdate, states: Mapping[str, State], elementwise: frozenset[str]
) -> None:
    """Raise CheckpointError on every rank, whichever of them own the elements."""
    for slot in sorted(update.slots):
        name, param = update.bucket.spec.names[slot], update.bucket.params[slot]
        for key, value in states.get(name, {}).items():
            if not isinstance(value, Tensor) or (value.dim() == 0 and key not in elementwise):
                continue
            if value.shape != param.shape:
                raise CheckpointError(
                    f"optimizer state {key} of parameter {name} has shape {tuple(value.shape)}, "
                    f"but the parameter has shape {tuple(param.shape)}; load the state of this "
                    "model and this optimizer",
                    code="state-of-other-model",
                )


def _cut_whole(state: Mapping[str, Any], param: Tensor, start: int, stop: int) -> State:
    """This rank's part of one parameter's whole state."""
    part: State = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            part[key] = value.clone() if isinstance(value, Tensor) else value
            continue
        like = torch.empty_strided(param.shape, param.stride(), dtype=value.dtype)
        like.copy_(value)
        part[key] = flattened(like)[start:stop].clone()
    return part
