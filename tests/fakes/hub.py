"""Hub: where fake ranks meet."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from dearmpi.comm.api.collectives import Buffer
from dearmpi.cuts import Cuts
from dearmpi.errors import CommError
from tests.fakes.contents import as_sent, combine, nbytes_of, signature_of
from tests.fakes.fault import Fault
from tests.fakes.letters import Letters
from tests.fakes.operation import Operation
from tests.fakes.record import Carried, Record


class FakeHub:
    """What the ranks of one process share: posted operations, a wire, a clock, and records.

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
        self.carried: list[Carried] = []
        self.most_in_flight: Counter[tuple[int, int]] = Counter()  # by rank and communicator
        self.failure = ""
        self.lock = threading.Lock()
        self._seconds, self._name, self._faults = seconds, name, tuple(faults)
        self._operations: dict[tuple[int, int], Operation] = {}
        self._num_posted: Counter[tuple[int, int]] = Counter()
        self._num_in_flight: Counter[tuple[int, int]] = Counter()
        self._num_met: Counter[Fault] = Counter()
        self._num_communicators = 1
        self._wire_free_s = float("-inf")
        self.messages: dict[int, deque[tuple[int, bytes]]] = {r: deque() for r in range(size)}
        self.letters = Letters()
        self._groups: dict[tuple[tuple[int, ...], int], FakeHub] = {}

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

    def group(self, ranks: tuple[int, ...], number: int) -> FakeHub:
        """The hub of some ranks, which these share."""
        with self.lock:
            if (ranks, number) not in self._groups:
                hosts = [self.hosts[rank] for rank in ranks]
                self._groups[ranks, number] = FakeHub(len(ranks), hosts=hosts, clock=self.clock)
            return self._groups[ranks, number]

    def fail(self, reason: str) -> None:
        """Let every operation that is incomplete, now or later, raise CommError."""
        with self.lock:
            self.failure = self.failure or reason
            groups = list(self._groups.values())
        for group in groups:
            group.fail(reason)

    def post(
        self,
        rank: int,
        communicator: int,
        kind: str,
        buffer: Any,
        detail: Any = None,
        carrier: Any = None,
        number: int | None = None,
        cuts: Cuts | None = None,
    ) -> Operation:
        """Post an operation.

        detail: its reduction, its root, or its algorithm. carrier: something of the dtype in which
        ``buffer`` travels, if not its own. number: in the order of operations, if ``reserve`` has
        given it. cuts: the shards of ``buffer``, if they are uneven.
        """
        carrier = buffer if carrier is None else carrier
        label = kind if buffer is None else kind + self._name(buffer)
        with self.lock:
            self.records.append(Record(rank, communicator, label))
            uneven = None if cuts is None or cuts.is_even else cuts
            what = signature_of(label, detail, buffer, carrier, uneven)
            number = self._next_number(rank, communicator) if number is None else number
            operation = self._join(rank, (communicator, number), kind, label, detail, what, uneven)
            fault = self._meet_fault(rank, communicator, label)
            if fault is not None and fault.action == "refuse":
                raise CommError(f"rank {rank}: {label} was refused (injected)")
            if fault is not None:
                operation.faults[rank] = fault
            if fault is None or fault.action != "stall":
                operation.contents[rank] = as_sent(buffer, carrier)
            if len(operation.contents) == self.size and not operation.error:
                self._match(operation, nbytes_of(buffer, carrier))
            self._count_in_flight(rank, communicator, +1)
            return operation

    def complete(self, rank: int, operation: Operation) -> None:
        """Note that ``operation`` is over on ``rank``; the caller holds the lock."""
        self._count_in_flight(rank, operation.place[0], -1)
        operation.num_delivered += 1
        if operation.num_delivered == self.size:
            del self._operations[operation.place]

    def reserve(self, rank: int, communicator: int) -> int:
        """The number of an operation that is posted later."""
        with self.lock:
            return self._next_number(rank, communicator)

    def _next_number(self, rank: int, communicator: int) -> int:
        self._num_posted[rank, communicator] += 1
        return self._num_posted[rank, communicator] - 1

    def _join(
        self,
        rank: int,
        place: tuple[int, int],
        kind: str,
        label: str,
        detail: Any,
        what: str,
        cuts: Cuts | None,
    ) -> Operation:
        """The operation that this post belongs to, made by the first rank to come."""
        operation = self._operations.get(place)
        if operation is None:
            operation = Operation(place, kind, label, detail, what, rank, cuts)
            self._operations[place] = operation
            if kind == "DUP":
                operation.result = self._num_communicators
                self._num_communicators += 1
        elif operation.signature != what:
            operation.error = (
                f"operation {place[1]} on communicator {place[0]}: rank "
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

    def _match(self, operation: Operation, nbytes: int) -> None:
        """All ranks are there: form the result and put it on the wire."""
        now_s = operation.done_at_s = self.clock()
        if operation.place[0] and operation.kind != "DUP":
            start_s = max(now_s, self._wire_free_s)
            operation.done_at_s = start_s + self._seconds(operation.label, nbytes)
            self._wire_free_s = operation.done_at_s
            self.carried.append(Carried(operation.label, start_s, operation.done_at_s))
        if operation.kind != "DUP":
            parts = [operation.contents[rank] for rank in range(self.size)]
            operation.result = combine(operation.kind, operation.detail, parts, operation.cuts)
        operation.contents = dict.fromkeys(operation.contents)
