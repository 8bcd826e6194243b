"""Requests of fake ranks: their views of operations, and of letters to come."""

from __future__ import annotations

from typing import Any

from dearmpi.comm.api.collectives import Buffer, Request
from dearmpi.cuts import even_cuts
from dearmpi.errors import CommError
from tests.fakes.contents import bytes_of, spoil
from tests.fakes.hub import FakeHub
from tests.fakes.letters import Route
from tests.fakes.operation import Operation


class FakeRequest(Request):
    """One rank's view of an operation; holds the buffer until it is complete."""

    def __init__(
        self, hub: FakeHub, operation: Operation, rank: int, buffer: Buffer | None
    ) -> None:
        self._hub, self._operation, self._rank = hub, operation, rank
        self._buffer, self._fault = buffer, operation.faults.get(rank)
        self._done = False
        if buffer is not None:
            if operation.kind == "EX":  # a shard from each rank, all of one length
                spoil(buffer, keep=rank, size=hub.size)
            elif operation.kind == "AG":
                spoil(buffer, keep=rank, size=hub.size, cuts=operation.cuts)
            elif operation.kind != "BC" or rank != operation.detail:
                spoil(buffer)
            self._bytes = bytes_of(buffer)

    def test(self) -> bool:
        """True once the operation is over and its result stands in the buffer."""
        with self._hub.lock:
            if self._done:
                return True
            self._raise_error(self._operation.error)
            done_at_s = self._operation.done_at_s
            late_s = self._fault.delay_s if self._fault else 0.0
            if done_at_s is None or self._hub.clock() < done_at_s + late_s:
                self._raise_error(self._hub.failure)
                return False
            if self._buffer is not None:
                self._deliver(self._buffer)
            self._hub.complete(self._rank, self._operation)
            self._done, self._buffer = True, None
            return True

    def _raise_error(self, reason: str) -> None:
        if self._fault is not None and self._fault.action == "break":
            raise CommError(f"rank {self._rank}: {self._operation.label} broke (injected)")
        if reason:
            raise CommError(f"rank {self._rank}: {self._operation.label} cannot complete: {reason}")

    def _deliver(self, buffer: Any) -> None:
        if self._hub.check_buffers and bytes_of(buffer) != self._bytes:
            raise CommError(
                f"rank {self._rank}: the buffer of {self._operation.label} was written to while "
                "the operation was in flight"
            )
        arrives = even_cuts(buffer.numel(), self._hub.size)
        own = (self._operation.cuts or arrives).slice_of(self._rank)
        if self._operation.kind == "EX":
            for rank, sent in enumerate(self._operation.result):
                if rank != self._rank:
                    buffer[arrives.slice_of(rank)].copy_(sent[own])
            return
        if self._operation.kind != "RS":
            buffer.copy_(self._operation.result)
            return
        spoil(buffer)
        buffer[own].copy_(self._operation.result[own])


class FakeReceive(Request):
    """A receive from one rank."""

    def __init__(self, hub: FakeHub, route: Route, buffer: Any) -> None:
        self._hub, self._route, self._buffer = hub, route, buffer
        with hub.lock:
            self._number = hub.letters.await_next(route)
        self._done = False

    def test(self) -> bool:
        """True once the letter was here."""
        with self._hub.lock:
            if not self._done:
                self._done = self._hub.letters.deliver(self._route, self._number, self._buffer)
            if not self._done and self._hub.failure:
                raise CommError(f"rank {self._route[2]}: a receive failed: {self._hub.failure}")
            return self._done
