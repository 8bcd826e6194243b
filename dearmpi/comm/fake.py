"""Ranks in one process, for tests: collectives without MPI, with delays, faults and records.

A ``FakeHub`` joins the ranks, says how long operations take and what goes wrong, and tells
afterwards what was posted when; ``ranks.run_ranks`` runs a function on all of them. An operation
happens once every rank has posted it: the nth on a communicator matches the nth of the other
ranks, and is an error on all of them if the kinds or lengths differ.

Operations on channels (duplicated communicators) share one wire, which carries one at a time; the
exchanges of ``World`` itself, on communicator 0, take no time and meet no fault. Buffers live on
the host. As with MPI, a buffer in flight, and after a reduce-scatter all but the own shard of it,
holds nothing of use: here, bytes of 0xFF, which are NaN in every float type.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dearmpi.comm.api import Buffer, Collectives, Completed, ReduceOp, Request
from dearmpi.comm.contents import (
    as_sent,
    bytes_of,
    combine,
    nbytes_of,
    shard_of,
    signature_of,
    spoil,
)
from dearmpi.comm.fake_letters import Letters, Route
from dearmpi.comm.scratch import carrier_of
from dearmpi.config import AllGather, ReduceScatter, WireDtype
from dearmpi.errors import CommError

Action = Literal["refuse", "break", "stall", "delay"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with the ``nth`` (from 1) operation called ``label`` (None: any) on ``rank``.

    ``refuse``: starting it raises CommError. ``break``: testing it does. ``stall``: it never
    completes, on any rank. ``delay``: it completes ``delay_s`` seconds late on this rank.
    """

    rank: int
    action: Action
    nth: int = 1
    label: str | None = None
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Record:
    """``rank`` posted ``label`` on ``communicator``; a mark of the test's own has None there."""

    rank: int
    communicator: int | None
    label: str


@dataclass(frozen=True, slots=True)
class Span:
    """``label`` occupied the wire of the hub from ``start_s`` to ``stop_s`` on its clock."""

    label: str
    start_s: float
    stop_s: float


class FakeClock:
    """Time that stands still until ``advance``; ``now`` serves as a hub's clock."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        """Seconds since the clock was made."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self._now_s += seconds


@dataclass(slots=True)
class _Operation:
    """One collective, as far as ranks have posted it; ``contents`` are copies made then."""

    place: tuple[int, int]  # communicator, and number on it
    kind: str
    label: str
    detail: Any
    signature: str
    first_rank: int
    contents: dict[int, Any] = field(default_factory=dict)
    result: Any = None
    done_at_s: float | None = None
    error: str = ""
    num_delivered: int = 0


class FakeHub:
    """What the ranks of one process share: who has posted what, a wire, a clock, and records.

    seconds(label, nbytes): how long an operation occupies the wire.
    name(buffer): appended to ``RS``, ``AG``, ``AR`` or ``BC`` to make a label such as ``RS2``.
    hosts: name of each rank's host. clock: seconds, such as ``FakeClock().now``.
    check_buffers: fail where a buffer is written to between post and completion.
    """

    def __init__(
        self,
        size: int,
        *,
        seconds: Callable[[str, int], float] = lambda label, nbytes: 0.0,
        faults: Sequence[Fault] = (),
        name: Callable[[Buffer], str] = lambda buffer: "",
        hosts: Sequence[str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        check_buffers: bool = True,
    ) -> None:
        self.size = size
        self.hosts = tuple(hosts or ["fakehost"] * size)
        self.clock = clock
        self.check_buffers = check_buffers
        self.records: list[Record] = []
        self.spans: list[Span] = []
        self.most_in_flight: Counter[tuple[int, int]] = Counter()  # by rank and communicator
        self.failure = ""
        self.lock = threading.Lock()
        self._seconds, self._name, self._faults = seconds, name, tuple(faults)
        self._operations: dict[tuple[int, int], _Operation] = {}
        self._num_posted: Counter[tuple[int, int]] = Counter()
        self._num_in_flight: Counter[tuple[int, int]] = Counter()
        self._num_met: Counter[Fault] = Counter()
        self._num_communicators = 1
        self._wire_free_s = float("-inf")
        self.messages: dict[int, deque[tuple[int, bytes]]] = {r: deque() for r in range(size)}
        self.letters = Letters()

    def collectives(self, rank: int) -> FakeCollectives:
        """The operations of ``rank`` on communicator 0."""
        return FakeCollectives(self, rank, 0)

    def mark(self, rank: int, text: str = "|") -> None:
        """Put ``text`` among the records of ``rank``, such as a bar where backprop ends."""
        with self.lock:
            self.records.append(Record(rank, None, text))

    def picture(self, rank: int, *communicators: int) -> str:
        """Marks and labels of ``rank`` in order of posting, such as ``RS1 RS0 | AG0 AG1``.

        ``communicators``: which ones, numbered from 1 as they were duplicated; default all.
        """
        shown = communicators or range(1, self._num_communicators)
        with self.lock:
            mine = [record for record in self.records if record.rank == rank]
        return " ".join(r.label for r in mine if r.communicator is None or r.communicator in shown)

    def fail(self, reason: str) -> None:
        """Let every operation that is incomplete, now or later, raise CommError."""
        with self.lock:
            self.failure = self.failure or reason

    def post(
        self,
        rank: int,
        communicator: int,
        kind: str,
        buffer: Any,
        detail: Any = None,
        carrier: Any = None,
    ) -> tuple[Request, _Operation]:
        """Post an operation.

        detail: its reduction, its root, or its algorithm. carrier: something of the dtype in which
        ``buffer`` travels, if not its own.
        """
        carrier = buffer if carrier is None else carrier
        label = kind if buffer is None else kind + self._name(buffer)
        with self.lock:
            self.records.append(Record(rank, communicator, label))
            what = signature_of(label, detail, buffer, carrier)
            operation = self._join(rank, communicator, kind, label, detail, what)
            fault = self._meet_fault(rank, communicator, label)
            if fault is not None and fault.action == "refuse":
                raise CommError(f"rank {rank}: {label} was refused (injected)")
            if fault is None or fault.action != "stall":
                operation.contents[rank] = as_sent(buffer, carrier)
            if len(operation.contents) == self.size and not operation.error:
                self._match(operation, nbytes_of(buffer, carrier))
            self._count_in_flight(rank, communicator, +1)
            return _FakeRequest(self, operation, rank, buffer, fault), operation

    def complete(self, rank: int, operation: _Operation) -> None:
        """Note that ``operation`` is over on ``rank``; the caller holds the lock."""
        self._count_in_flight(rank, operation.place[0], -1)
        operation.num_delivered += 1
        if operation.num_delivered == self.size:
            del self._operations[operation.place]

    def _join(
        self,
        rank: int,
        communicator: int,
        kind: str,
        label: str,
        detail: Any,
        what: str,
    ) -> _Operation:
        """The operation that this post belongs to, made by the first rank to come."""
        place = communicator, self._num_posted[rank, communicator]
        self._num_posted[rank, communicator] += 1
        operation = self._operations.get(place)
        if operation is None:
            operation = _Operation(place, kind, label, detail, what, rank)
            self._operations[place] = operation
            if kind == "DUP":
                operation.result = self._num_communicators
                self._num_communicators += 1
        elif operation.signature != what:
            operation.error = (
                f"operation {place[1]} on communicator {communicator}: rank "
                f"{operation.first_rank} posted {operation.signature}, rank {rank} posted {what}"
            )
        return operation

    def _count_in_flight(self, rank: int, communicator: int, change: int) -> None:
        key = rank, communicator
        self._num_in_flight[key] += change
        self.most_in_flight[key] = max(self.most_in_flight[key], self._num_in_flight[key])

    def _meet_fault(self, rank: int, communicator: int, label: str) -> Fault | None:
        met = None
        for fault in self._faults:
            if communicator and fault.rank == rank and fault.label in (None, label):
                self._num_met[fault] += 1
                met = fault if self._num_met[fault] == fault.nth else met
        return met

    def _match(self, operation: _Operation, nbytes: int) -> None:
        """All ranks are there: form the result and put it on the wire."""
        now_s = operation.done_at_s = self.clock()
        if operation.place[0] and operation.kind != "DUP":
            start_s = max(now_s, self._wire_free_s)
            operation.done_at_s = start_s + self._seconds(operation.label, nbytes)
            self._wire_free_s = operation.done_at_s
            self.spans.append(Span(operation.label, start_s, operation.done_at_s))
        if operation.kind != "DUP":
            parts = [operation.contents[rank] for rank in range(self.size)]
            operation.result = combine(operation.kind, operation.detail, parts)
        operation.contents = dict.fromkeys(operation.contents)


class _FakeRequest:
    """One rank's view of an operation; holds the buffer until it is complete."""

    def __init__(
        self,
        hub: FakeHub,
        operation: _Operation,
        rank: int,
        buffer: Buffer | None,
        fault: Fault | None,
    ) -> None:
        self._hub, self._operation, self._rank = hub, operation, rank
        self._buffer, self._fault = buffer, fault
        self._done = False
        if buffer is not None:
            if operation.kind == "AG":
                spoil(buffer, keep=rank, size=hub.size)
            elif operation.kind == "BC" and rank != operation.detail:
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
        if self._operation.kind != "RS":
            buffer.copy_(self._operation.result)
            return
        shard = shard_of(buffer, self._rank, self._hub.size)
        spoil(buffer)
        shard.copy_(shard_of(self._operation.result, self._rank, self._hub.size))


class _FakeReceive:
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


class FakeCollectives:
    """``Collectives`` of one in-process rank on one communicator of its hub."""

    def __init__(self, hub: FakeHub, rank: int, communicator: int) -> None:
        self.rank, self.size, self.host = rank, hub.size, hub.hosts[rank]
        self._hub, self._communicator = hub, communicator

    def start_reduce_scatter(
        self, buffer: Buffer, algorithm: ReduceScatter, *, wire_dtype: WireDtype | None = None
    ) -> Request:
        """Sum in rank order, in the buffer's own dtype, what is rounded once for the wire."""
        return self._start("RS", buffer, algorithm, wire_dtype)

    def start_all_gather(
        self,
        buffer: Buffer,
        algorithm: AllGather = "native",
        *,
        wire_dtype: WireDtype | None = None,
    ) -> Request:
        """Fill ``buffer`` with every rank's shard of it."""
        return self._start("AG", buffer, algorithm, wire_dtype=wire_dtype)

    def start_all_reduce(self, buffer: Buffer, op: ReduceOp) -> Request:
        """Reduce ``buffer`` in rank order."""
        return self._hub.post(self.rank, self._communicator, "AR", buffer, op)[0]

    def start_broadcast(self, buffer: Buffer, root: int) -> Request:
        """Copy ``buffer`` of ``root`` to every rank."""
        return self._hub.post(self.rank, self._communicator, "BC", buffer, root)[0]

    def start_duplicate(self) -> tuple[Collectives, Request]:
        """The next communicator of the hub."""
        request, operation = self._hub.post(self.rank, self._communicator, "DUP", None)
        return FakeCollectives(self._hub, self.rank, operation.result), request

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
        return _FakeReceive(self._hub, (self._communicator, source, self.rank, tag), buffer)

    def abort(self, code: int) -> None:
        """Fail the other ranks and raise SystemExit, since the process is theirs as well."""
        self._hub.fail(f"rank {self.rank} aborted the job with exit status {code}")
        raise SystemExit(code)

    def _start(
        self,
        kind: str,
        buffer: Buffer,
        detail: Any = None,
        wire_dtype: WireDtype | None = None,
    ) -> Request:
        if buffer.numel() % self.size:
            raise CommError(
                f"{kind} of {buffer.numel()} elements over {self.size} ranks: the length must be "
                "a multiple of the world size"
            )
        carrier = buffer if self.size == 1 else carrier_of(buffer, wire_dtype)
        return self._hub.post(self.rank, self._communicator, kind, buffer, detail, carrier)[0]
