"""Ring reduce-scatter: P - 1 rounds, in each of which every rank sends one shard to its successor.

Bandwidth-optimal on any MPI, since each round is one full-duplex exchange with fixed neighbours
(senders never meet at a receiver), and it needs no reduction from MPI, so that half precision and
device buffers work wherever point-to-point does. A small state machine, driven by ``test``.
"""

from __future__ import annotations

from typing import Any, Protocol

from dearmpi.comm.api import Buffer, Request


class PointToPoint(Protocol):
    """What a ring needs: sends and receives of whole buffers, matched by tag."""

    def start_send(self, buffer: Buffer, destination: int, tag: int) -> Request: ...

    def start_receive(self, buffer: Buffer, source: int, tag: int) -> Request: ...


class RingReduceScatter:
    """Sum of ``buffer`` over ranks; complete when this rank's shard holds its part of the sum.

    Round s sends shard ``rank - 1 - s`` and adds the incoming shard ``rank - 2 - s``; after
    P - 1 rounds the last shard added is the rank's own. ``scratch`` holds two shards, so that the
    next round's receive is posted before this round's data is added.
    """

    def __init__(
        self,
        transport: PointToPoint,
        buffer: Buffer,
        *,
        rank: int,
        size: int,
        tag: int,
        scratch: Any,
    ) -> None:
        self._transport = transport
        self._rank, self._size, self._tag = rank, size, tag
        numel = buffer.numel() // size
        self._shards = [buffer[i * numel : (i + 1) * numel] for i in range(size)]
        self._incoming = [scratch[:numel], scratch[numel : 2 * numel]]
        self._round = 0
        self._receives: list[Request] = []
        self._sends: list[Request] = []
        if size > 1:
            self._post_receive(0)
            self._post_send()

    def test(self) -> bool:
        """Advance by as many rounds as have arrived; True when all are done."""
        while self._round < self._size - 1:
            if not self._receives[self._round].test():
                return False
            self._finish_round()
        self._sends = [send for send in self._sends if not send.test()]
        return not self._sends

    def _finish_round(self) -> None:
        arrived = self._incoming[self._round % 2]
        target = self._shards[(self._rank - 2 - self._round) % self._size]
        target.add_(arrived)
        self._round += 1
        if self._round < self._size - 1:
            self._post_send()

    def _post_receive(self, number: int) -> None:
        source = (self._rank - 1) % self._size
        self._receives.append(
            self._transport.start_receive(self._incoming[number % 2], source, self._tag)
        )

    def _post_send(self) -> None:
        """Send this round's shard, with the receive of the next round posted beforehand."""
        if self._round + 1 < self._size - 1:
            self._post_receive(self._round + 1)
        shard = self._shards[(self._rank - 1 - self._round) % self._size]
        successor = (self._rank + 1) % self._size
        self._sends.append(self._transport.start_send(shard, successor, self._tag))
