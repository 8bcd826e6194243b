"""Collectives of one fake rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from dearmpi.comm.algorithms.scratch import carrier_of
from dearmpi.comm.api.collectives import (
    Buffer,
    Collectives,
    Completed,
    ReduceOp,
    Request,
    shards_of_buffer,
)
from dearmpi.config import ReduceScatter, WireDtype
from dearmpi.cuts import Cuts
from dearmpi.grid import Grid
from tests.fakes.hub import FakeHub
from tests.fakes.request import FakeReceive, FakeRequest


class FakeCollectives:
    """``Collectives`` of one in-process rank on one communicator of its hub: 0 is the world's."""

    def __init__(self, hub: FakeHub, rank: int, communicator: int = 0) -> None:
        self.rank, self.size, self.hosts = rank, hub.size, hub.hosts
        self._hub, self._communicator = hub, communicator
        self._reserved: int | None = None

    def start_reduce_scatter(
        self,
        buffer: Buffer,
        algorithm: ReduceScatter | Grid,
        *,
        wire_dtype: WireDtype | None = None,
        cuts: Cuts | None = None,
    ) -> Request:
        """Sum in rank order, in the buffer's own dtype, what is rounded once for the wire."""
        return self._post_shards("RS", buffer, algorithm, wire_dtype, cuts)

    def start_all_gather(
        self,
        buffer: Buffer,
        algorithm: ReduceScatter | Grid = "native",
        *,
        wire_dtype: WireDtype | None = None,
        cuts: Cuts | None = None,
    ) -> Request:
        """Fill ``buffer`` with every rank's shard of it."""
        return self._post_shards("AG", buffer, algorithm, wire_dtype, cuts)

    def start_exchange(self, sent: Buffer, arrived: Buffer, *, cuts: Cuts | None = None) -> Request:
        """Send each rank its shard of ``sent``."""
        cuts = shards_of_buffer("EX", sent, self.size, cuts)
        operation = self._hub.post(self.rank, self._communicator, "EX", sent, None, sent, cuts=cuts)
        return FakeRequest(self._hub, operation, self.rank, arrived)

    def reserve(self) -> AbstractContextManager[None]:
        """The next number belongs to the operation that is posted in the block."""
        return self._under(self._hub.reserve(self.rank, self._communicator))

    @contextmanager
    def _under(self, number: int) -> Iterator[None]:
        self._reserved = number
        yield
        assert self._reserved is None, "no operation has started in its place"

    def start_all_reduce(self, buffer: Buffer, op: ReduceOp) -> Request:
        """Reduce ``buffer`` in rank order."""
        return self._post("AR", buffer, op)

    def start_broadcast(self, buffer: Buffer, root: int) -> Request:
        """Copy ``buffer`` of ``root`` to every rank."""
        return self._post("BC", buffer, root)

    def start_duplicate(self) -> tuple[Collectives, Request]:
        """The next communicator of the hub."""
        operation = self._hub.post(self.rank, self._communicator, "DUP", None)
        twin = FakeCollectives(self._hub, self.rank, operation.result)
        return twin, FakeRequest(self._hub, operation, self.rank, None)

    def make_group(self, ranks: Sequence[int], number: int) -> Collectives:
        """On a hub of their own; waits for nobody."""
        hub = self._hub.group(tuple(ranks), number)
        return FakeCollectives(hub, list(ranks).index(self.rank))

    def free(self) -> None:
        """Nothing to give back."""

    def start_message(self, data: bytes, destination: int) -> Request:
        """Put ``data`` into the other rank's mailbox."""
        self._hub.messages[destination].append((self.rank, data))
        return Completed()

    def receive_message(self) -> tuple[int, bytes] | None:
        """The oldest message in this rank's mailbox."""
        mailbox = self._hub.messages[self.rank]
        return mailbox.popleft() if mailbox else None

    def start_send(self, buffer: Buffer, destination: int, tag: int) -> Request:
        """Send a copy of ``buffer`` to one rank; takes no time."""
        with self._hub.lock:
            self._hub.letters.send((self._communicator, self.rank, destination, tag), buffer)
        return Completed()

    def start_receive(self, buffer: Buffer, source: int, tag: int) -> Request:
        """Receive into ``buffer`` from one rank."""
        return FakeReceive(self._hub, (self._communicator, source, self.rank, tag), buffer)

    def abort(self, code: int) -> None:
        """Fail the other ranks and raise SystemExit, since the process is theirs as well."""
        self._hub.fail(f"rank {self.rank} aborted the job with exit status {code}")
        raise SystemExit(code)

    def _post_shards(
        self,
        kind: str,
        buffer: Buffer,
        algorithm: ReduceScatter | Grid,
        wire_dtype: WireDtype | None,
        cuts: Cuts | None,
    ) -> Request:
        shards_of_buffer(kind, buffer, self.size, cuts)
        carrier = buffer if self.size == 1 else carrier_of(buffer, wire_dtype)
        return self._post(kind, buffer, algorithm, carrier, cuts)

    def _post(
        self,
        kind: str,
        buffer: Buffer,
        detail: Any,
        carrier: Any = None,
        cuts: Cuts | None = None,
    ) -> Request:
        number, self._reserved = self._reserved, None
        operation = self._hub.post(
            self.rank, self._communicator, kind, buffer, detail, carrier, number, cuts
        )
        return FakeRequest(self._hub, operation, self.rank, buffer)
