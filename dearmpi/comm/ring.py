"""Ring reduce-scatter: P - 1 rounds, in each of which every rank sends one shard to its successor.

Bandwidth-optimal on any MPI, since each round is one full-duplex exchange with fixed neighbours
(senders never meet at a receiver), and it needs no reduction from MPI, so that half precision and
device buffers work wherever point-to-point does. A small state machine, driven by ``test``.

Shards travel in chunks: while one is added the next ones are on the wire, and what a rank needs of
scratch memory does not grow with the bucket. They may travel in half precision, at half the bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from dearmpi.comm.api import Buffer, Request

CHUNK_BYTES = 1 << 20
_MOST_SCRATCH = 4


@runtime_checkable
class PointToPoint(Protocol):
    """What a ring needs: sends and receives of whole buffers, matched by tag."""

    def start_send(self, buffer: Buffer, destination: int, tag: int) -> Request: ...

    def start_receive(self, buffer: Buffer, source: int, tag: int) -> Request: ...


def num_chunks(shard_numel: int, element_size: int) -> int:
    """In how many messages a shard travels as elements of ``element_size`` bytes."""
    return max(1, -(-shard_numel * element_size // CHUNK_BYTES))


def num_scratch(shard_numel: int, element_size: int, size: int) -> int:
    """How many scratch buffers, of a chunk each, a ring over ``size`` ranks can use."""
    return min(_MOST_SCRATCH, (size - 1) * num_chunks(shard_numel, element_size))


class RingReduceScatter:
    """Sum of ``buffer`` over ranks; complete when this rank's shard holds its part of the sum.

    Round s sends shard ``rank - 1 - s`` and adds the incoming shard ``rank - 2 - s``, chunk by
    chunk; what is added in one round is what the next one sends, and after P - 1 rounds it is the
    rank's own shard. ``scratch``: buffers of a chunk each, at least one, into which receives are
    posted before what came last is added. ``outgoing``: likewise, into which chunks are copied to
    be sent; none: they are sent from where they are. Where both are of a narrower dtype, partial
    sums are rounded once a hop, P - 1 times, and added in the buffer's own.
    """

    def __init__(
        self,
        transport: PointToPoint,
        buffer: Buffer,
        *,
        rank: int,
        size: int,
        tag: int,
        scratch: Sequence[Any],
        outgoing: Sequence[Any] = (),
    ) -> None:
        self._transport = transport
        self._buffer, self._shard_numel = buffer, buffer.numel() // size
        self._rank, self._size, self._tag = rank, size, tag
        element_size = scratch[0].element_size() if scratch else buffer.element_size()
        self._num_chunks = num_chunks(self._shard_numel, element_size)
        self._chunk_numel = -(-self._shard_numel // self._num_chunks)
        self._num_messages = (size - 1) * self._num_chunks
        self._num_added = self._num_sent = 0
        self._scratch, self._outgoing = scratch, outgoing
        self._receives: deque[Request] = deque()
        self._sends: deque[Request] = deque()
        for number in range(min(len(scratch), self._num_messages)):
            self._post_receive(number)
        self._post_sends()

    def test(self) -> bool:
        """Advance by as many chunks as have arrived; True when all are done."""
        while self._receives and self._receives[0].test():
            self._receives.popleft()
            self._finish_receive(self._num_added)
        while self._num_sent < self._num_ready and self._sends[0].test():
            self._sends.popleft()
            self._post_sends()
        if self._num_sent < self._num_messages or self._receives:
            return False  # every poll of MPI costs, and drives the sends as well
        while self._sends and self._sends[0].test():
            self._sends.popleft()
        return not self._sends

    @property
    def num_arrived(self) -> int:
        """How many messages have come in so far."""
        return self._num_added

    @property
    def _num_ready(self) -> int:
        """How many messages may be sent: those of the first round, and what was added since."""
        return min(self._num_messages, self._num_chunks + self._num_added)

    def _finish_receive(self, number: int) -> None:
        """Add what arrived, send it on, and let its scratch receive again."""
        target = self._part(self._rank - 2, number)
        target.add_(self._incoming(number, target.numel()))
        self._num_added += 1
        self._post_sends()
        if number + len(self._scratch) < self._num_messages:
            self._post_receive(number + len(self._scratch))

    def _post_sends(self) -> None:
        """Post what is ready, as far as there is memory to send it from."""
        while self._num_sent < self._num_ready:
            if self._outgoing and len(self._sends) == len(self._outgoing):
                return
            self._post_send(self._num_sent)
            self._num_sent += 1

    def _post_receive(self, number: int) -> None:
        numel = self._part(self._rank - 2, number).numel()
        self._receives.append(
            self._transport.start_receive(
                self._incoming(number, numel), (self._rank - 1) % self._size, self._tag
            )
        )

    def _post_send(self, number: int) -> None:
        part = self._part(self._rank - 1, number)
        if self._outgoing:
            # Sends are taken back in order, so that this one's turn finds its memory free.
            part = self._outgoing[number % len(self._outgoing)][: part.numel()].copy_(part)
        successor = (self._rank + 1) % self._size
        self._sends.append(self._transport.start_send(part, successor, self._tag))

    def _incoming(self, number: int, numel: int) -> Any:
        return self._scratch[number % len(self._scratch)][:numel]

    def _part(self, first_shard: int, number: int) -> Any:
        """The elements of message ``number``: its chunk of shard ``first_shard`` less its round."""
        rounds, chunk = divmod(number, self._num_chunks)
        base = (first_shard - rounds) % self._size * self._shard_numel
        start = min(chunk * self._chunk_numel, self._shard_numel)
        stop = min(start + self._chunk_numel, self._shard_numel)
        return self._buffer[base + start : base + stop]
