"""Grid collectives: reduce-scatter and all-gather dimension by dimension, such as first within
hosts and then between them. ``dearmpi.grid`` says who sends what in a stage.

Between N hosts of L ranks each host sends (N - 1) / N of a buffer, where a ring sends
(NL - 1) / NL of it. Chunks are in different dimensions at the same time, so that the wire between
hosts and their memory work together. Pieces of shards are sent from where they lie, and gathered in
place: nothing is packed.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dearmpi.comm.algorithms.algorithm import MessagePassing, Priority, SendScheduler
from dearmpi.comm.algorithms.ring import ring_order
from dearmpi.comm.api.collectives import Buffer, Movement, Request
from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.cuts import Cuts
from dearmpi.errors import ConfigError
from dearmpi.grid import Grid, GridStage, Line, Peer, num_chunks, piece, stages_of

_WINDOW = 2  # stages open at once in a dimension, so that one is on the wire while one is added


def grid_of(
    sizes: Sequence[int],
    hosts: Sequence[str],
    order: Sequence[int] = (),
    rates: Sequence[float] = (),
) -> Grid:
    """The grid of ``sizes``, from inner to outer, without dimensions of one rank.

    hosts: of each rank; the product of ``sizes`` is their number. order: ranks by place; those of a
    host next to each other unless given. rates: of each dimension, or none, as in ``Grid``.
    """
    assert math.prod(sizes) == len(hosts), "a grid has a point for each rank"
    kept = [number for number, size in enumerate(sizes) if size > 1]
    return Grid(
        tuple(sizes[number] for number in kept),
        tuple(order) or ring_order(hosts),
        rates=tuple(rates[number] for number in kept) if rates else (),
    )


_GROUPS = ("ranks", "hosts", "racks")


def grid_of_places(
    world: World,
    topology: str,
    places: Sequence[tuple[str, ...]],
    rates: Sequence[float] = (),
) -> Grid | None:
    """The grid of ranks whose places are known: of each its host, or its rack and host.

    None where it has one dimension, which is what a ring is made for, and where one group has more
    members than another. Rank 0 warns of that; ``topology`` is what asks for the grid. rates: of
    each level, from ranks of a host to the outermost, or none; as in ``Grid``.
    """
    paths = [(*place, str(rank)) for rank, place in enumerate(places)]
    first: dict[tuple[str, ...], int] = {}
    sizes = []
    for number, depth in enumerate(range(len(paths[0]), 0, -1)):
        for rank, path in enumerate(paths):
            first.setdefault(path[:depth], rank)
        counts = Counter(path[:-1] for path in {path[:depth] for path in paths})
        if len(set(counts.values())) > 1:
            if world.is_root:
                warnings.warn(
                    f"topology {topology!r} is flat here: {_GROUPS[number + 1]} have from "
                    f"{min(counts.values())} to {max(counts.values())} {_GROUPS[number]}, and a "
                    "grid needs as many in each",
                    stacklevel=9,
                )
            return None
        sizes.append(next(iter(counts.values())))
    depths = range(1, len(paths[0]) + 1)
    order = sorted(range(world.size), key=lambda rank: [first[paths[rank][:d]] for d in depths])
    grid = grid_of(sizes, world.hosts, order, rates)
    return grid if len(grid.sizes) > 1 else None


def choose_grid(world: World, config: EngineConfig) -> Grid | None:
    """The grid that ``config.topology`` describes; None for collectives without one.

    Warns as ``grid_of_places`` does. Raises ConfigError for sizes whose product is not the number
    of ranks.
    """
    sizes = config.grid_sizes
    if sizes and math.prod(sizes) != world.size:
        raise ConfigError(
            f"topology is {config.topology!r}, of {math.prod(sizes)} ranks, but the world size is "
            f"{world.size}; give sizes whose product is the world size",
            code="topology-misfit",
        )
    if config.topology == "flat" or world.size == 1:
        return None
    if not sizes:
        return grid_of_places(world, config.topology, [(host,) for host in world.hosts])
    grid = grid_of(sizes, world.hosts, config.grid_order, config.grid_rates)
    return grid if len(grid.sizes) > 1 else None  # one dimension is what a ring is made for


class DimensionLane:
    """One operation's messages in one dimension: an operation for the scheduler of its wire.

    Stages open in the order of ``line``, which all ranks share, at most ``_WINDOW`` of them. So the
    messages between two ranks, which meet in one dimension alone, match by their order.
    """

    def __init__(self, operation: GridOperation, scheduler: SendScheduler, line: Line) -> None:
        self.priority, self.bytes_out = operation.priority, 0
        self._operation, self._scheduler, self._line = operation, scheduler, line
        self._num_opened = 0
        # By open stage: its chunk, and what is to come.
        self._open: list[tuple[int, deque[_Arrival]]] = []
        self._outbox: deque[tuple[slice, int]] = deque()
        self._sends: deque[tuple[Request, int, Any]] = deque()
        self._has_left = False
        scheduler.enter(self)

    @property
    def is_over(self) -> bool:
        """Whether everything was sent, and has arrived."""
        return self._has_left and not self._open and not self._sends

    def receive(self) -> int:
        """Take in what has arrived; the number of messages."""
        num_arrived, operation = 0, self._operation
        for chunk, arrivals in self._open:
            while arrivals and arrivals[0].request.test():
                operation.take(arrivals.popleft())
                num_arrived += 1
            if not arrivals:
                operation.reached[chunk] += 1
        if num_arrived:
            self._open = [one for one in self._open if one[1]]
        return num_arrived

    def send(self) -> bool:
        """Open stages and post what may be sent; whether earlier sends are complete."""
        num_before = len(self._sends)
        while self._sends and self._sends[0][0].test():
            _, nbytes, room = self._sends.popleft()
            self.bytes_out -= nbytes
            self._operation.give_back(room)
        has_released = len(self._sends) < num_before
        while self._may_open():
            self._open_next()
        while self._outbox and self._scheduler.admits(self):
            where, receiver = self._outbox.popleft()
            request, nbytes, room = self._operation.start_send(where, receiver)
            self._sends.append((request, nbytes, room))
            self.bytes_out += nbytes
        if not self._has_left and self._num_opened == len(self._line) and not self._outbox:
            self._scheduler.leave(self)
            self._has_left = True
        return has_released

    def _may_open(self) -> bool:
        if self._num_opened == len(self._line) or len(self._open) == _WINDOW:
            return False
        chunk, stage = self._line[self._num_opened]
        return self._operation.reached[chunk] == stage

    def _open_next(self) -> None:
        chunk, number = self._line[self._num_opened]
        self._num_opened += 1
        incoming, outgoing = self._operation.messages(chunk, number)
        arrivals = deque(self._operation.start_receive(*message) for message in incoming)
        self._outbox.extend(outgoing)
        if arrivals:
            self._open.append((chunk, arrivals))
        else:  # nothing comes: the chunk goes on
            self._operation.reached[chunk] += 1


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A message to come, for the elements ``where``. room: the scratch memory that it comes into;
    None: it comes in place.
    """

    request: Request
    where: slice
    room: Any


_Message = tuple[slice, int]
"""Elements of the buffer, and the rank that they go to or come from."""


class GridOperation(Request):
    """A reduce-scatter or an all-gather on a grid. reached: by chunk, its next stage."""

    priority: ClassVar[Priority]
    is_gather: ClassVar[bool]

    def __init__(
        self,
        transport: MessagePassing,
        grid: Grid,
        schedulers: Sequence[SendScheduler],
        buffer: Buffer,
        cuts: Cuts,
        *,
        carrier: Buffer,
    ) -> None:
        """``schedulers``: of the wire of each dimension."""
        self._transport, self._grid, self._tag = transport, grid, transport.next_tag()
        self._buffer, self._cuts, self._carrier = buffer, cuts, carrier
        self._num_chunks = num_chunks(cuts, carrier.element_size())
        self.reached = [0] * self._num_chunks
        self._num_arrived, self._movement, self._is_over = 0, Movement.NONE, False
        self._orders = grid.orders_for(self._num_chunks)
        lines = grid.lines(self._num_chunks, is_gather=self.is_gather)
        self._lanes = [
            DimensionLane(self, scheduler, line)
            for scheduler, line in zip(schedulers, lines, strict=True)
        ]
        for lane in self._lanes:
            lane.send()

    def test(self) -> bool:
        if self._is_over:
            return True
        num_arrived = sum([lane.receive() for lane in self._lanes])
        has_released = sum([lane.send() for lane in self._lanes])  # all of them send
        self._num_arrived += num_arrived
        self._movement = Movement.MESSAGE if num_arrived or has_released else Movement.NONE
        self._is_over = all(lane.is_over for lane in self._lanes)
        return self._is_over

    @property
    def movement(self) -> Movement:
        return self._movement

    @property
    def num_arrived(self) -> int:
        return self._num_arrived

    def messages(self, chunk: int, number: int) -> tuple[list[_Message], list[_Message]]:
        """What comes in and what goes out in stage ``number`` of ``chunk``; no empty ones."""
        stages = stages_of(self._grid, self._transport.rank, self._orders[chunk])
        stage = stages[-1 - number if self.is_gather else number]
        incoming, outgoing = self._parts(stage)
        return self._pieces(incoming, chunk), self._pieces(outgoing, chunk)

    def _pieces(self, parts: Sequence[Peer], chunk: int) -> list[_Message]:
        pieces = [
            (piece(self._cuts, shard, chunk, self._num_chunks), peer.rank)
            for peer in parts
            for shard in peer.shards
        ]
        return [one for one in pieces if one[0].stop > one[0].start]

    def start_send(self, where: slice, receiver: int) -> tuple[Request, int, Any]:
        """The send of elements, its bytes, and its scratch memory, if it has any."""
        part, room = self._buffer[where], None
        if self._carrier is not self._buffer:
            room = self._transport.scratch.take(self._carrier, part.numel())
            part = room[: part.numel()].copy_(part)
        request = self._transport.start_send(part, receiver, self._tag)
        return request, part.numel() * part.element_size(), room

    def give_back(self, room: Any) -> None:
        """``room`` is free, if it is any."""
        if room is not None:
            self._transport.scratch.give_back(room)

    def start_receive(self, where: slice, sender: int) -> _Arrival:
        """Have elements come from ``sender``."""
        part, room = self._buffer[where], self._room_for(where.stop - where.start)
        if room is not None:
            part = room[: where.stop - where.start]
        return _Arrival(self._transport.start_receive(part, sender, self._tag), where, room)

    @abstractmethod
    def take(self, arrival: _Arrival) -> None:
        """Take in what has arrived."""

    @abstractmethod
    def _parts(self, stage: GridStage) -> tuple[Sequence[Peer], Sequence[Peer]]:
        """The shards that come in a stage, and those that go out, with the ranks."""

    @abstractmethod
    def _room_for(self, numel: int) -> Any:
        """Scratch memory to receive into; None to receive in place."""


class GridReduceScatter(GridOperation):
    """Sum of ``buffer`` over ranks; complete when this rank's shard holds its part of the sum.

    A narrower ``carrier`` rounds partial sums once in each dimension.
    """

    priority = Priority.REDUCE_SCATTER
    is_gather = False

    def take(self, arrival: _Arrival) -> None:
        """Add it, in an order that is the same in each run."""
        numel = arrival.where.stop - arrival.where.start
        self._buffer[arrival.where].add_(arrival.room[:numel])
        self.give_back(arrival.room)

    def _parts(self, stage: GridStage) -> tuple[Sequence[Peer], Sequence[Peer]]:
        return [Peer(peer.rank, stage.kept) for peer in stage.before], stage.after

    def _room_for(self, numel: int) -> Any:
        return self._transport.scratch.take(self._carrier, numel)


class GridAllGather(GridOperation):
    """Every rank's shard of ``buffer``, in place."""

    priority = Priority.ALL_GATHER
    is_gather = True

    def take(self, arrival: _Arrival) -> None:
        """Nothing to do: it was received in place."""

    def _parts(self, stage: GridStage) -> tuple[Sequence[Peer], Sequence[Peer]]:
        return stage.before, [Peer(peer.rank, stage.kept) for peer in stage.after]

    def _room_for(self, numel: int) -> Any:
        return None


class GridAlgorithm:
    """Both operations on one communicator and one grid.

    Dimensions that cross hosts share the scheduler of the rank's wire; with rates each has a wire
    of its own. The others have one that all grids of the communicator share.
    """

    def __init__(self, transport: MessagePassing, grid: Grid) -> None:
        self._transport, self._grid = transport, grid
        crosses = [grid.crosses_hosts(d, transport.hosts) for d in range(len(grid.sizes))]
        wires = [transport.scheduler] * len(crosses)
        if grid.rates:
            first = crosses.index(True) if any(crosses) else 0
            wires[first + 1 :] = map(transport.scheduler.beside, range(first + 1, len(crosses)))
        pairs = zip(crosses, wires, strict=True)
        self._schedulers = [wire if outer else transport.inside for outer, wire in pairs]

    def start_reduce_scatter(self, buffer: Buffer, cuts: Cuts, *, carrier: Buffer) -> Request:
        """As in ``Algorithm``; takes scratch memory for what is to come in open stages."""
        return GridReduceScatter(
            self._transport, self._grid, self._schedulers, buffer, cuts, carrier=carrier
        )

    def start_all_gather(self, buffer: Buffer, cuts: Cuts) -> Request:
        """As in ``Algorithm``; in place, without scratch memory."""
        return GridAllGather(
            self._transport, self._grid, self._schedulers, buffer, cuts, carrier=buffer
        )
