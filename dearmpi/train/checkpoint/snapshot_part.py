"""A snapshot, or what one rank holds of a run's state, as a part of a checkpoint and its head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dearmpi.engine.state.local_state import StatePiece
from dearmpi.train.checkpoint import encoding
from dearmpi.train.checkpoint.part import Part, Piece, check_storable, divide
from dearmpi.train.checkpoint.snapshot import Snapshot
from dearmpi.train.checkpoint.tensor_file import find_aliases


@dataclass(frozen=True, slots=True)
class Head:
    """What the manifest says beside the files, encoded; fields as in ``Manifest``."""

    model: Sequence[str]
    aliases: Mapping[str, str]
    groups: Sequence[dict[str, Any]]
    meta: Mapping[str, Any]


def make_head(snapshot: Snapshot) -> Head:
    """The head of the checkpoint of ``snapshot``, of whose model the names alone count."""
    return Head(
        model=list(snapshot.model),
        aliases=find_aliases(snapshot.model),
        groups=encoding.encode(snapshot.groups, where="groups", tensors={}),
        meta=encoding.encode(snapshot.meta, where="meta"),
    )


def make_part(
    snapshot: Snapshot, *, shards: Sequence[StatePiece] = (), rank: int = 0, size: int = 1
) -> Part:
    """The part of ``rank``: its share of ``snapshot``, the same on all ranks, and its own shards
    of the optimizer's state. Values are not copied.

    Raises CheckpointError for values that a checkpoint cannot hold.
    """
    tied = find_aliases(snapshot.model)
    common = {model_key(name): t for name, t in snapshot.model.items() if name not in tied}
    state: dict[str, Tensor] = {}
    described = {
        name: encoding.encode(entries, where=_state_key(name), tensors=state)
        for name, entries in snapshot.optimizer.items()
    }
    encoding.encode(snapshot.groups, where="groups", tensors=state)
    pieces = divide(common, rank=rank, size=size) | divide(state, rank=rank, size=size)
    for shard in shards:
        described[shard.name] = _add_shard(shard, pieces)
    return Part(pieces, {"optimizer": described, "random": (snapshot.random or [{}])[0]})


def model_key(name: str) -> str:
    """Under which name the model's tensor ``name`` is stored."""
    return f"model/{name}"


def _state_key(name: str) -> str:
    return f"optimizer/{name}"


def _add_shard(shard: StatePiece, pieces: dict[str, Piece]) -> dict[str, Any]:
    """Add a shard's tensors to ``pieces``; returns its entries, encoded."""
    described: dict[str, Any] = {}
    for key, values in shard.tensors.items():
        name = f"{_state_key(shard.name)}/{key}"
        check_storable(name, values)
        pieces[name] = Piece.of(values, start=shard.start, like=shard.param)
        described[key] = {"$tensor": name}
    if shard.start == 0:  # whoever owns the first element speaks for the parameter as a whole
        scalars: dict[str, Tensor] = {}
        described |= encoding.encode(
            dict(shard.scalars), where=_state_key(shard.name), tensors=scalars
        )
        pieces.update(divide(scalars, rank=0, size=1))
    return described
