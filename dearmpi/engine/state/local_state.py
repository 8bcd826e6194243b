"""What a rank holds of the optimizer's state, read without talking to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dearmpi.engine.update.shard_update import Run, ShardUpdate
from dearmpi.engine.update.update import is_elementwise_tensor
from dearmpi.engine.update.updates import Updates, wholes_of


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
    pieces: this rank's share of all other state.
    """

    groups: list[dict[str, Any]]
    whole: dict[str, dict[str, Any]]
    pieces: list[StatePiece]


def read_whole(updates: Updates) -> dict[str, dict[str, Any]]:
    """The state that every rank holds, by parameter name."""
    whole: dict[str, dict[str, Any]] = {}
    for update in wholes_of(updates):
        whole.update(update.states())
    return whole


def read_pieces(updates: Sequence[ShardUpdate]) -> list[StatePiece]:
    """The state of the elements that this rank owns."""
    return [piece for update in updates for run in update.runs for piece in _cut_run(update, run)]


def _cut_run(update: ShardUpdate, run: Run) -> list[StatePiece]:
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
