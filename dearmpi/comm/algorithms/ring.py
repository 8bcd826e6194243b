"""Rounds: P - 1 of them, in each of which every rank sends one shard and receives one; and rings,
in which each rank sends to its successor alone. Shards may differ in length, and be empty.

Bandwidth-optimal on any MPI, since each round is one full-duplex exchange, so that senders never
meet at a receiver. Needs only point-to-point of MPI, so that half precision and device buffers work
wherever point-to-point does. Small state machines, driven by ``test``.

Shards travel in chunks. While one is added the next ones are on the wire, and scratch memory does
not grow with the bucket. A message of higher priority (``SendScheduler``) waits for no whole shard
of lower priority. Chunks may travel in half precision, at half the bytes.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from dearmpi.comm.algorithms.algorithm import MessagePassing, Priority, SendScheduler
from dearmpi.comm.algorithms.scratch import ScratchRequest
from dearmpi.comm.api.collectives import Buffer, Movement, PointToPoint, Request
from dearmpi.config import ReduceScatter
from dearmpi.cuts import Cuts

CHUNK_BYTES = 1 << 20
_MOST_RECEIVES = 6


def num_chunks(shard_numel: int, element_size: int) -> int:
    """Number of messages of a shard whose elements travel with ``element_size`` bytes; none of an
    empty one.

    Each message costs a core about 0.15 ms. Yet above half a chunk there are two, so that one
    travels on while the other comes in.
    """
    nbytes = shard_numel * element_size
    least = min(2 if 2 * nbytes > CHUNK_BYTES else 1, shard_numel)
    return max(least, -(-nbytes // CHUNK_BYTES))


def num_receives(shard_numel: int, element_size: int, size: int) -> int:
    """Number of receives that rounds of ``size`` ranks post ahead, one chunk each; at most so many
    if ``shard_numel`` is that of the largest shard.
    """
    return min(_MOST_RECEIVES, (size - 1) * num_chunks(shard_numel, element_size))


def ring_order(hosts: Sequence[str]) -> tuple[int, ...]:
    """Ranks in their order around the ring, the ranks of a host next to each other.

    hosts: of each rank. Each link between hosts then carries the data once, in any placement of
    ranks. Where ranks are numbered host by host it is the order of their numbers.
    """
    first: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    return tuple(sorted(range(len(hosts)), key=lambda rank: first[hosts[rank]]))


@dataclass(frozen=True, slots=True)
class RingContext:
    """Where rounds run.

    order: ranks around the ring. place: of this rank in it. tag: of all messages of one operation.
    scheduler: of all rounds of this rank.
    """

    transport: PointToPoint
    order: tuple[int, ...]
    place: int
    tag: int
    scheduler: SendScheduler

    @property
    def size(self) -> int:
        return len(self.order)

    def rank_at(self, place: int) -> int:
        """The rank at ``place``, counted around the ring."""
        return self.order[place % len(self.order)]


def contexts_on(transport: MessagePassing) -> Callable[[], RingContext]:
    """Makes the context of each next operation, under a tag of its own."""
    order = ring_order(transport.hosts)
    place = order.index(transport.rank)
    return lambda: RingContext(
        transport, order, place, tag=transport.next_tag(), scheduler=transport.scheduler
    )


class Chunks:
    """The messages of some shards, one shard after the other; none of an empty shard.

    starts: the number of each shard's first message, and behind them that of all messages.
    """

    def __init__(self, cuts: Cuts, ranks: Sequence[int], *, element_size: int) -> None:
        """``ranks``: whose shards. ``element_size``: in bytes, of elements on the wire."""
        self._cuts, self._ranks = cuts, ranks
        self.starts: Sequence[int]
        if cuts.is_even:
            num = num_chunks(cuts.largest, element_size)
            self.starts = range(0, num * len(ranks) + 1, num)
        else:
            counts = (num_chunks(cuts.size_of(rank), element_size) for rank in ranks)
            self.starts = (0, *accumulate(counts))

    def __len__(self) -> int:
        return self.starts[-1]

    def index_of(self, number: int) -> int:
        """Which of the shards message ``number`` is a part of."""
        return bisect_right(self.starts, number) - 1

    def slice_of(self, number: int) -> slice:
        """The elements of message ``number``."""
        index = self.index_of(number)
        first, last = self._cuts.range_of(self._ranks[index])
        start, stop = self.starts[index], self.starts[index + 1]
        chunk_numel = -(-(last - first) // (stop - start))
        begin = min(first + (number - start) * chunk_numel, last)
        return slice(begin, min(begin + chunk_numel, last))


class Rounds(Request):
    """Rounds in flight, whose messages go in order. A rank may have more to send than to receive,
    or nothing at all, where shards are uneven.
    """

    priority: ClassVar[Priority]

    def __init__(
        self, context: RingContext, cuts: Cuts, *, element_size: int, num_sends: int, num_takes: int
    ) -> None:
        """``element_size``: in bytes, of elements on the wire. ``num_takes``: messages to come."""
        self._context = context
        self._num_sends, self._num_takes = num_sends, num_takes
        # Of even shards each rank gets as many messages as it sends, so that these tell what is in
        # flight. Else a rank may only send, and has to look whether its sends are complete.
        self._counts_bytes = not cuts.is_even
        self._unit_bytes = element_size
        if cuts.is_even:
            num = num_chunks(cuts.largest, element_size)
            self._unit_bytes = max(1, -(-cuts.largest // num) * element_size)
        self._num_arrived = self._num_sent = self._units_out = 0
        self._movement = Movement.NONE
        self._receives: deque[Request] = deque()
        self._sends: deque[Request] = deque()
        self._lengths: deque[int] = deque()  # of sends, where bytes are counted
        for number in range(min(_MOST_RECEIVES, num_takes)):
            self._post_receive(number)
        if num_sends:
            context.scheduler.enter(self)
            self._post_sends()

    def test(self) -> bool:
        num_before = self._num_arrived
        while self._receives and self._receives[0].test():
            self._receives.popleft()
            self._take(self._num_arrived)
            self._num_arrived += 1
            if self._num_sent < self._num_sends:
                self._post_sends()
            if self._num_arrived + len(self._receives) < self._num_takes:
                self._post_receive(self._num_arrived + len(self._receives))
        moved = self._num_arrived > num_before
        if self._counts_bytes and self._release_sends():
            moved = True
        self._movement = Movement.MESSAGE if moved else Movement.NONE
        if self._num_sent < self._num_sends:
            self._post_sends()  # the scheduler or the staging memory may have held it back
        if self._num_sent < self._num_sends or self._receives:
            return False  # sends advance with any poll of MPI, and each poll costs
        self._release_sends()
        return not self._sends

    @property
    def movement(self) -> Movement:
        return self._movement

    @property
    def num_arrived(self) -> int:
        return self._num_arrived

    @property
    def bytes_out(self) -> int:
        if self._counts_bytes:
            return self._units_out * self._unit_bytes
        return max(0, self._num_sent - self._num_arrived) * self._unit_bytes

    def _post_sends(self) -> None:
        """Post the messages that are ready. Call it only while messages are left to send."""
        num_ready, context = self._num_ready(), self._context
        while self._num_sent < num_ready and context.scheduler.admits(self) and self._has_room():
            part = self._outgoing(self._num_sent)
            receiver = context.rank_at(context.place + self._send_distance(self._num_sent))
            self._sends.append(context.transport.start_send(part, receiver, context.tag))
            self._num_sent += 1
            if self._counts_bytes:
                self._lengths.append(part.numel())
                self._units_out += part.numel()
        if self._num_sent == self._num_sends:
            self._context.scheduler.leave(self)

    def _post_receive(self, number: int) -> None:
        part, context = self._incoming(number), self._context
        sender = context.rank_at(context.place - self._receive_distance(number))
        self._receives.append(context.transport.start_receive(part, sender, context.tag))

    def _release_sends(self) -> bool:
        """Let go of the sends that are complete; whether there were any."""
        num_before = len(self._sends)
        while self._sends and self._sends[0].test():
            self._sends.popleft()
            if self._counts_bytes:
                self._units_out -= self._lengths.popleft()
        return len(self._sends) < num_before

    @abstractmethod
    def _num_ready(self) -> int:
        """How many messages may have been sent by now."""

    @abstractmethod
    def _send_distance(self, number: int) -> int:
        """How many places after this rank the receiver of message ``number`` is."""

    @abstractmethod
    def _receive_distance(self, number: int) -> int:
        """How many places before this rank the sender of message ``number`` is."""

    @abstractmethod
    def _outgoing(self, number: int) -> Any:
        """The memory that message ``number`` is sent from."""

    @abstractmethod
    def _incoming(self, number: int) -> Any:
        """The memory that message ``number`` is received into."""

    @abstractmethod
    def _take(self, number: int) -> None:
        """Take in message ``number``, which has arrived."""

    def _has_room(self) -> bool:
        """Whether staging memory is free to send from."""
        return True


class Ring(Rounds):
    """Rounds with fixed neighbours, through which the shards of all ranks pass in one order: that
    of their places, backwards from ``first_place``.

    All but the last of them are sent, and all but the first of them come in. So a message that
    comes in goes out one shard later.
    """

    def __init__(
        self, context: RingContext, buffer: Buffer, cuts: Cuts, *, first_place: int, width: int
    ) -> None:
        """``width``: in bytes, of elements on the wire."""
        self._buffer, size = buffer, context.size
        ranks = [context.rank_at(first_place - index) for index in range(size)]
        self._chunks = Chunks(cuts, ranks, element_size=width)
        # By number: each is received, and then sent on.
        self._parts: dict[int, Any] = {}
        self._lead = self._chunks.starts[1]
        super().__init__(
            context,
            cuts,
            element_size=width,
            num_sends=self._chunks.starts[size - 1],
            num_takes=len(self._chunks) - self._lead,
        )

    def _num_ready(self) -> int:
        """All of the first shard, and all that came in a shard ago."""
        return min(self._num_sends, self._lead + self._num_arrived)

    def _send_distance(self, number: int) -> int:
        return 1

    def _receive_distance(self, number: int) -> int:
        return 1

    def _part(self, number: int) -> Any:
        """The elements of message ``number`` of all that pass."""
        part = self._parts.get(number)
        if part is None:
            part = self._parts[number] = self._buffer[self._chunks.slice_of(number)]
        return part


class RingAllGather(Ring):
    """Every rank's shard of ``buffer``, in place.

    Round s sends the shard of the rank s places before.
    """

    priority = Priority.ALL_GATHER

    def __init__(self, context: RingContext, buffer: Buffer, cuts: Cuts) -> None:
        super().__init__(
            context, buffer, cuts, first_place=context.place, width=buffer.element_size()
        )

    def _outgoing(self, number: int) -> Any:
        return self._part(number)

    def _incoming(self, number: int) -> Any:
        return self._part(self._lead + number)

    def _take(self, number: int) -> None:
        """Nothing to do: it was received in place."""


class RingReduceScatter(Ring):
    """Sum of ``buffer`` over ranks; complete when this rank's shard holds its part of the sum.

    Round s sends the shard of the rank ``s + 1`` places before. It adds the incoming shard of the
    rank ``s + 2`` places before, chunk by chunk. The next round sends the sum. After P - 1 rounds
    it is the rank's own shard.

    scratch: ``num_receives`` buffers of a chunk each, for receives that are posted ahead.
    outgoing: as many buffers, into which chunks are copied before sending; empty: chunks are sent
        in place. With buffers of a narrower dtype, partial sums are rounded at each of P - 1 hops
        and added in the dtype of ``buffer``.
    """

    priority = Priority.REDUCE_SCATTER

    def __init__(
        self,
        context: RingContext,
        buffer: Buffer,
        cuts: Cuts,
        *,
        scratch: Sequence[Any],
        outgoing: Sequence[Any] = (),
    ) -> None:
        self._scratch, self._staging = scratch, outgoing
        self._expected: deque[Any] = deque()
        width = scratch[0].element_size() if scratch else buffer.element_size()
        assert len(scratch) >= num_receives(cuts.largest, width, context.size)
        super().__init__(context, buffer, cuts, first_place=context.place - 1, width=width)

    def _outgoing(self, number: int) -> Any:
        part = self._part(number)
        if not self._staging:
            return part
        # Sends complete in order, so that the memory of this one is free by now.
        return self._staging[number % len(self._staging)][: part.numel()].copy_(part)

    def _incoming(self, number: int) -> Any:
        numel = self._part(self._lead + number).numel()
        self._expected.append(self._scratch[number % len(self._scratch)][:numel])
        return self._expected[-1]

    def _has_room(self) -> bool:
        if not self._staging:
            return True
        self._release_sends()
        return len(self._sends) < len(self._staging)

    def _take(self, number: int) -> None:
        self._part(self._lead + number).add_(self._expected.popleft())


class RingAlgorithm:
    """``Algorithm`` of the two rings on one communicator."""

    all_gather: ClassVar[ReduceScatter] = "ring"

    def __init__(self, transport: MessagePassing) -> None:
        self._transport = transport
        self._next_context = contexts_on(transport)

    def start_reduce_scatter(self, buffer: Buffer, cuts: Cuts, *, carrier: Buffer) -> Request:
        """Takes scratch memory of a few chunks, twice that to send another dtype."""
        scratch, width = self._transport.scratch, carrier.element_size()
        num = num_receives(cuts.largest, width, cuts.num_ranks)
        numel = min(cuts.largest, CHUNK_BYTES // width)
        incoming = [scratch.take(carrier, numel) for _ in range(num)]
        outgoing = []
        if carrier is not buffer:
            outgoing = [scratch.take(carrier, numel) for _ in range(num)]
        ring = RingReduceScatter(
            self._next_context(), buffer, cuts, scratch=incoming, outgoing=outgoing
        )
        return ScratchRequest(scratch, ring, held=[*incoming, *outgoing])

    def start_all_gather(self, buffer: Buffer, cuts: Cuts) -> Request:
        """In place, without scratch memory."""
        return RingAllGather(self._next_context(), buffer, cuts)
