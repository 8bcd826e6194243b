"""Resharding: optimizer state goes from the shards of one layout to those of another.

Each element goes from the rank that has it to the rank that is to have it. All that goes to one
rank is fused into a ``SendBuffer``. So a rank sends at most its own share of the state, and never
holds more than two shares and a bucket. All of it happens on the progress thread.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dearmpi.comm.api.collectives import Chain, Collectives, Completed, PeerMessages, Request
from dearmpi.comm.messages.collective_calls import gather_texts
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.device.comm_stream import CommStream
from dearmpi.engine.state.owned_state import OwnedMove, State
from dearmpi.engine.state.sharded_state import (
    StatePiece,
    describe,
    read_pieces,
    read_scalar,
    read_whole,
)
from dearmpi.engine.update.shard_update import (
    ParamRange,
    ShardUpdate,
    Updates,
    owned_of,
    shards_of,
    wholes_of,
)
from dearmpi.plan.data.layout import Bucket, BucketLayout, Placement

Place = tuple[int, str]
"""A rank, and the name of a dtype."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """Elements ``start`` to ``stop`` of a parameter's state ``key``, from rank to rank."""

    name: str
    key: str
    dtype: str
    source: int
    target: int
    start: int
    stop: int


class SendBuffers:
    """A tensor in host memory for each rank and dtype, in which parts lie in their order.

    A model has hundreds of small tensors, so that a message for each would be far too many.
    """

    def __init__(
        self, parts: Sequence[tuple[int, StatePart]], known: Mapping[Place, Tensor]
    ) -> None:
        """parts: each with the rank on the other side. known: those that are there already."""
        self._sizes: dict[Place, list[int]] = defaultdict(list)
        for rank, part in parts:
            self._sizes[rank, part.dtype].append(part.stop - part.start)
        self.tensors = {
            place: known[place]
            if place in known
            else torch.empty(sum(sizes), dtype=getattr(torch, place[1]), device="cpu")
            for place, sizes in sorted(self._sizes.items())
        }

    def of(self, rank: int) -> dict[Place, Tensor]:
        """Those with ``rank`` on the other side."""
        return {place: tensor for place, tensor in self.tensors.items() if place[0] == rank}

    def to_others(self, rank: int) -> list[tuple[int, Tensor]]:
        """Those with another rank than ``rank`` on the other side, which is named with each."""
        return [(other, tensor) for (other, _), tensor in self.tensors.items() if other != rank]

    def pieces(self) -> dict[Place, Iterator[Tensor]]:
        """The parts' elements, in their order."""
        return {place: iter(t.split(self._sizes[place])) for place, t in self.tensors.items()}


Descriptions = Mapping[str, Mapping[str, Any]]
"""Parameter name to state key to what it is (``state.describe``)."""


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """Elements ``start`` to ``stop`` of a parameter, which ``rank`` owns."""

    rank: int
    start: int
    stop: int


def owned_ranges(bucket: Bucket, placed: Placement) -> list[OwnedRange]:
    """Which rank owns which elements of the parameter in ``placed``, by rank."""
    owned = []
    for rank in bucket.cuts.owners(placed.start, placed.stop):
        first, last = bucket.cuts.range_of(rank)
        start, stop = max(first, placed.start), min(last, placed.stop)
        if start < stop:
            owned.append(OwnedRange(rank, start - placed.start, stop - placed.start))
    return owned


def pair(
    old: Sequence[OwnedRange], new: Sequence[OwnedRange], *, rank: int
) -> Iterator[tuple[OwnedRange, OwnedRange]]:
    """Ranges of a parameter that have elements in common, where ``rank`` has one of both.

    In the order of ``old``, and then of ``new``: that in which every rank sees those that it has.
    """
    own = [owned for owned in new if owned.rank == rank]
    for one in old:
        for other in new if one.rank == rank else own:
            if one.start < other.stop and other.start < one.stop:
                yield one, other


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank is to hold of a parameter's state: ``numel`` elements of each tensor.

    entries: by key, what any rank has described. pieces: by key, what has come so far, in order.
    """

    numel: int
    entries: Mapping[str, Any]
    pieces: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, key: str, start: int, values: Tensor) -> None:
        """Elements from ``start`` on; what lies between them and those before is zero."""
        pieces = self.pieces.setdefault(key, [])
        missing = start - sum(piece.numel() for piece in pieces)
        pieces += [values.new_zeros(missing), values] if missing else [values]

    def complete(self) -> None:
        """Nothing more comes."""
        for key, entry in self.entries.items():
            if "tensor" in entry:
                self.add(
                    key,
                    self.numel,
                    torch.empty(0, dtype=getattr(torch, entry["tensor"]), device="cpu"),
                )


class Resharding:
    """State on its way from the updates of one layout to those of another, on the progress thread,
    in two parts of a ``Chain``. State that every rank holds whole stays so.
    """

    def __init__(
        self, updates: Updates, comm_stream: CommStream, layout: BucketLayout, *, rank: int
    ) -> None:
        """From ``updates``, which run at ``comm_stream``, to the owners by ``layout``."""
        self._rank, self._from, self._comm_stream = rank, updates, comm_stream
        self._owners = {
            placed.spec.name: owned_ranges(bucket, placed)
            for bucket in layout
            for placed in bucket.placements
        }
        self._whole: dict[str, State] = {}
        self._described: list[Descriptions] = []
        self._receives: list[StatePart] = []
        self._sent = SendBuffers([], {})
        self._owned = OwnedMove(layout, rank=rank) if owned_of(updates) else None

    def take(self, collectives: Collectives) -> Iterator[Request]:
        """Have the updates, whose last step is over, let go of their state (collective). Does
        nothing when called again.

        Between two buckets other operations of the same thread have their turn.
        """
        self._whole |= read_whole(self._from)
        if self._owned is not None:
            self._owned.take(owned_of(self._from))
        shards, self._from = shards_of(self._from), ()
        if not shards:
            return
        with self._comm_stream.running():
            own = {name: entries for update in shards for name, entries in describe(update).items()}
            held = [read_pieces([update]) for update in shards]
        buckets = [update.bucket.spec for update in shards]
        shards.clear()  # which keep the memory of their buckets
        texts = yield from gather_texts(collectives, json.dumps(own))
        self._described = [json.loads(text) for text in texts]
        listed = [list(self._list_parts(bucket)) for bucket in buckets]
        parts = [part for of_bucket in listed for part in of_bucket]
        self._receives = [part for part in parts if part.target == self._rank]
        sends = [(part.target, part) for part in parts if part.source == self._rank]
        self._sent = SendBuffers(sends, {})
        rooms = self._sent.pieces()
        for of_bucket in listed:
            with self._comm_stream.running():
                self._pack(held.pop(0), of_bucket, rooms)
            yield Completed()

    def deliver(
        self, collectives: Collectives, updates: Updates, comm_stream: CommStream
    ) -> Iterator[Request]:
        """Bring what is taken to ``updates``, which run at ``comm_stream`` (collective)."""
        yield from self.take(collectives)
        with comm_stream.running():
            for whole in wholes_of(updates):
                whole.set_states(self._whole)
        if self._owned is not None:
            yield from self._owned.exchange(collectives)
            self._owned.deliver(owned_of(updates))
        arrived = SendBuffers([(p.source, p) for p in self._receives], self._sent.of(self._rank))
        sends, receives = self._sent.to_others(self._rank), arrived.to_others(self._rank)
        self._sent = SendBuffers([], {})
        if sends or receives:
            yield PeerMessages(collectives, sends=sends, receives=receives)
        sends.clear()
        shares = self._open(arrived)
        for update in shards_of(updates):
            with comm_stream.running():
                _place(update, shares)
            yield Completed()

    def _list_parts(self, bucket: Bucket) -> Iterator[StatePart]:
        """What this rank sends or receives of an old bucket, in an order that all ranks have."""
        for placed in bucket.placements:
            name = placed.spec.name
            owned = owned_ranges(bucket, placed)
            for old, new in pair(owned, self._owners[name], rank=self._rank):
                start, stop = max(old.start, new.start), min(old.stop, new.stop)
                entries = self._described[old.rank].get(name, {})
                for key in sorted(key for key, entry in entries.items() if "tensor" in entry):
                    dtype = entries[key]["tensor"]
                    yield StatePart(name, key, dtype, old.rank, new.rank, start, stop)

    def _pack(
        self,
        held: Iterable[StatePiece],
        parts: Iterable[StatePart],
        rooms: Mapping[Place, Iterator[Tensor]],
    ) -> None:
        pieces = {piece.name: piece for piece in held}
        for part in parts:
            if part.source == self._rank:
                values, origin = pieces[part.name].tensors[part.key], pieces[part.name].start
                room = next(rooms[part.target, part.dtype])
                room.copy_(values[part.start - origin : part.stop - origin])

    def _open(self, arrived: SendBuffers) -> dict[str, Share]:
        """What this rank is to hold, by parameter name."""
        starts: dict[str, int] = {}
        shares: dict[str, Share] = {}
        for name, owners in self._owners.items():
            for own in (owned for owned in owners if owned.rank == self._rank):
                entries: dict[str, Any] = {}
                for described in self._described:
                    entries |= described.get(name, {})
                starts[name], shares[name] = own.start, Share(own.stop - own.start, entries)
        pieces = arrived.pieces()
        for part in self._receives:
            values = next(pieces[part.source, part.dtype])
            shares[part.name].add(part.key, part.start - starts[part.name], values)
        for share in shares.values():
            share.complete()
        return shares


def _place(update: ShardUpdate, shares: Mapping[str, Share]) -> None:
    """Replace the state of ``update``."""
    names = update.bucket.spec.names

    def of(pieces: Sequence[ParamRange]) -> list[Share]:
        return [shares[names[piece.slot]] for piece in pieces]

    alike = all(_is_alike(of(run.pieces)) for run in update.runs)
    if not alike:
        update.split()
    for run in update.runs:
        update.set_state(run, _join(of(run.pieces), run.values.device))
    if not alike:
        update.merge()


def _is_alike(shares: Sequence[Share]) -> bool:
    """Whether neighbours have the same entries, and scalars of the same values."""
    return all(share.entries == shares[0].entries for share in shares)


def _join(shares: Sequence[Share], device: torch.device) -> State:
    """The state of neighbours as that of one tensor."""
    return {
        key: torch.cat([piece for share in shares for piece in share.pieces[key]]).to(device)
        if "tensor" in entry
        else read_scalar(entry)
        for key, entry in shares[0].entries.items()
    }


class ReshardingChannel:
    """On which state travels. Opened at the first use, or before (collective): where a migration is
    known to come, before the wire is busy.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._channel: Channel | None = None

    def open(self) -> Channel:
        """Open it, unless it is open."""
        if self._channel is None:
            self._channel = self._world.open_channel("resharding", window=1)
        return self._channel

    def run(self, steps: Callable[[Collectives], Iterator[Request]]) -> None:
        """Carry out a part of a ``Resharding`` (collective)."""
        self.open().run("the optimizer's state", lambda collectives: Chain(steps(collectives)))

    def close(self) -> None:
        """Give it back (collective)."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
