"""Relocation: optimizer state goes from the shards of one layout to those of another.

Bucket by bucket, each element from the rank that has it to the rank that is to have it. So a rank
sends at most its own share of the state, and never holds more than two shares and a few buckets.
Several buckets are on their way together: what was spread over all ranks in one of them may have a
single rank as its new owner, and would keep only that rank's link busy.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from dearmpi.comm.api import Collectives
from dearmpi.comm.transfer import Transfer
from dearmpi.comm.world import Channel, World
from dearmpi.engine.local_state import read_pieces, read_whole
from dearmpi.engine.shard_update import Run, ShardUpdate
from dearmpi.engine.state import State, describe, read_scalar
from dearmpi.engine.whole_update import WholeUpdate
from dearmpi.plan.layout import Bucket, BucketLayout, Slot

NUM_UNDER_WAY = 8  # buckets

Descriptions = Sequence[Mapping[str, Mapping[str, Any]]]
"""Of one bucket, by rank: parameter name to state key to what it is (``state.describe``)."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements ``start`` to ``stop`` of a parameter, which ``rank`` owns."""

    rank: int
    start: int
    stop: int


def stretches(bucket: Bucket, slot: Slot) -> list[Stretch]:
    """Who owns which elements of the parameter in ``slot``, by rank."""
    numel = bucket.shard_numel
    return [
        Stretch(
            rank,
            max(0, rank * numel - slot.start),
            min(slot.stop, (rank + 1) * numel) - slot.start,
        )
        for rank in range(slot.start // numel, (slot.stop - 1) // numel + 1)
    ]


def relocate_state(
    world: World, updates: Sequence[ShardUpdate | WholeUpdate], layout: BucketLayout
) -> dict[str, State]:
    """What this rank is to hold under ``layout``, by parameter name (collective).

    Of sharded state that is the own stretch of each parameter, in 1-D tensors, and ``updates`` let
    go of theirs; state that every rank holds whole stays so.
    """
    states = read_whole(updates)
    shards = [update for update in updates if isinstance(update, ShardUpdate)]
    if not shards:
        return states
    own = json.dumps([describe(update) for update in shards])
    described = [json.loads(text) for text in world.all_gather_text(own)]
    owners = {s.spec.name: stretches(bucket, s) for bucket in layout for s in bucket.slots}
    channel = world.open_channel("relocation", window=NUM_UNDER_WAY)
    under_way: deque[Callable[[], dict[str, State]]] = deque()
    for number, update in enumerate(shards):
        if len(under_way) == NUM_UNDER_WAY:
            states |= under_way.popleft()()
        move = _Move(world.rank, owners, [by_bucket[number] for by_bucket in described])
        held = {piece.name: piece.tensors for piece in read_pieces([update])}
        for slot in update.bucket.plan.slots:
            move.add(update.bucket.plan, slot, held.get(slot.spec.name, {}))
        under_way.append(move.begin(channel, f"the state of bucket {update.bucket.index}"))
        for run in update.runs:
            update.set_state(run, {})
    for arrived in under_way:
        states |= arrived()
    channel.close()
    return states


def place_state(updates: Sequence[ShardUpdate | WholeUpdate], states: Mapping[str, State]) -> None:
    """Put what ``relocate_state`` gave into the updates of the layout that it was given."""
    for update in updates:
        if isinstance(update, WholeUpdate):
            update.set_states(states)
            continue
        whole = all(_is_alike(_parts(update, run, states)) for run in update.runs)
        if not whole:
            update.split()
        for run in update.runs:
            update.set_state(run, _joined(_parts(update, run, states), run.values.device))
        if not whole:
            update.merge()


def _parts(update: ShardUpdate, run: Run, states: Mapping[str, State]) -> list[State]:
    names = update.bucket.plan.names
    return [states.get(names[slot], {}) for slot, _, _ in run.pieces]


def _is_alike(parts: Sequence[State]) -> bool:
    """Whether neighbours have the same entries, and scalars of the same values."""
    first = parts[0]
    return all(
        part.keys() == first.keys()
        and all(_is_same(value, first[key]) for key, value in part.items())
        for part in parts[1:]
    )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dim() == other.dim() and (one.dim() > 0 or torch.equal(one, other))
    return type(one) is type(other) and bool(one == other)


def _joined(parts: Sequence[State], device: torch.device) -> State:
    """The state of neighbours as that of one tensor."""
    return {
        key: torch.cat([part[key] for part in parts]).to(device)
        if isinstance(value, Tensor) and value.dim() > 0
        else value
        for key, value in parts[0].items()
    }


class _Move:
    """The state of one bucket on its way: what this rank sends, receives, or only copies.

    owners: of each parameter's elements from now on. described: what ranks hold of this bucket.
    """

    def __init__(
        self, rank: int, owners: Mapping[str, Sequence[Stretch]], described: Descriptions
    ) -> None:
        self._rank, self._owners, self._described = rank, owners, described
        self._sends: list[tuple[int, Tensor]] = []
        self._receives: list[tuple[int, Tensor]] = []
        self._arrived: dict[str, State] = {}

    def add(self, bucket: Bucket, slot: Slot, held: Mapping[str, Tensor]) -> None:
        """A parameter in its old place. held: what this rank has of it, by state key."""
        name = slot.spec.name
        for new in self._owners[name]:
            if new.rank == self._rank:
                self._make_room(name, new.stop - new.start)
        for old, new in product(stretches(bucket, slot), self._owners[name]):
            described = self._described[old.rank].get(name, {})
            start, stop = max(old.start, new.start), min(old.stop, new.stop)
            for key in sorted(key for key, entry in described.items() if "tensor" in entry):
                if start < stop and old.rank == self._rank:
                    part = held[key][start - old.start : stop - old.start].cpu()
                    self._sends.append((new.rank, part))
                if start < stop and new.rank == self._rank:
                    room = self._arrived[name][key][start - new.start : stop - new.start]
                    self._receives.append((old.rank, room))

    def begin(self, channel: Channel, label: str) -> Callable[[], dict[str, State]]:
        """Send copies, and receive (collective). To call what comes back is to wait for what
        arrives, by parameter name.

        A message for each rank and dtype: a bucket may hold hundreds of small tensors.
        """
        sends, receives = _by_rank(self._sends), _by_rank(self._receives)
        parcels = {place: torch.cat(parts) for place, parts in sends.items()}
        arrived = {
            place: parcels[place]
            if place[0] == self._rank
            else torch.empty(sum(room.numel() for room in rooms), dtype=rooms[0].dtype)
            for place, rooms in receives.items()
        }

        def start(collectives: Collectives) -> Transfer:
            return Transfer(
                collectives,
                sends=[(rank, part) for (rank, _), part in parcels.items() if rank != self._rank],
                receives=[
                    (rank, part) for (rank, _), part in arrived.items() if rank != self._rank
                ],
            )

        wait = channel.begin(label, start)

        def finish() -> dict[str, State]:
            wait()
            for place, rooms in receives.items():
                parts = arrived[place].split([room.numel() for room in rooms])
                for room, part in zip(rooms, parts, strict=True):
                    room.copy_(part)
            return self._arrived

        return finish

    def _make_room(self, name: str, numel: int) -> None:
        """Tensors and scalars as any rank described them; zero where nothing arrives."""
        entries: dict[str, Any] = {}
        for by_name in self._described:
            entries |= by_name.get(name, {})
        if entries:
            self._arrived[name] = {
                key: torch.zeros(numel, dtype=getattr(torch, entry["tensor"]))
                if "tensor" in entry
                else read_scalar(entry)
                for key, entry in entries.items()
            }


def _by_rank(parts: Sequence[tuple[int, Tensor]]) -> dict[tuple[int, str], list[Tensor]]:
    """By rank and dtype, in an order that both sides have."""
    found: dict[tuple[int, str], list[Tensor]] = {}
    for rank, part in parts:
        found.setdefault((rank, str(part.dtype)), []).append(part)
    return dict(sorted(found.items()))
