"""Algorithm: a reduce-scatter and an all-gather that belong together.

A new one is a class in a file of its own. It takes its name in ``config.ReduceScatter``, a line in
``registry.ALGORITHMS``, and its cost in ``plan/model/cost.py``.

The ``SendScheduler`` knows what this rank's operations have on the wire, and which may send next.
Messages from one rank to another leave in the order in which MPI gets them. A small bucket for
which the next layer waits would queue behind all messages of large buckets. So MPI gets no more
than keeps the wire busy, and operations of higher priority send first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from typing import ClassVar, Protocol

from dearmpi.comm.algorithms.scratch import Scratch
from dearmpi.comm.api.collectives import Buffer, Request
from dearmpi.config import ReduceScatter
from dearmpi.cuts import Cuts

# 1.7 ms of a link of 10 Gbit/s, no less than the time between polls. Beyond some 20 Gbit/s the wire
# runs dry between polls once no operation has begun or ended for 20 ms.
MOST_BYTES = 2 << 20


class Priority(IntEnum):
    """Operations of lower priority yield to higher ones.

    All-gathers fill the gaps of reduce-scatters: all reduce-scatters must end before the all-gather
    that the first layer waits for can begin.
    """

    ALL_GATHER = 0
    REDUCE_SCATTER = 1


class RingOperation(Protocol):
    """A ring in flight, which sends as many messages as it receives."""

    @property
    def priority(self) -> Priority: ...

    @property
    def bytes_out(self) -> int:
        """Bytes sent less bytes received.

        All ranks of a ring move at one pace, so the successor has about this to receive yet.
        """
        ...


class SendScheduler:
    """The rings that still send on this rank, by priority and then in order of start."""

    def __init__(self) -> None:
        self._operations: list[RingOperation] = []
        self._beside: dict[int, SendScheduler] = {}

    def beside(self, number: int) -> SendScheduler:
        """The scheduler of another wire of this rank, which all its communicators share too."""
        return self._beside.setdefault(number, SendScheduler())

    def enter(self, operation: RingOperation) -> None:
        """Take ``operation``, which calls ``admits`` from now on."""
        place = len(self._operations)
        while place and self._operations[place - 1].priority < operation.priority:
            place -= 1
        self._operations.insert(place, operation)

    def leave(self, operation: RingOperation) -> None:
        """Drop ``operation``, which has sent everything."""
        self._operations = [other for other in self._operations if other is not operation]

    def admits(self, operation: RingOperation) -> bool:
        """Whether ``operation`` may send its next message.

        It may if it has nothing in flight: ranks may order their rings differently for a while,
        and each ring must move on by itself. Otherwise it waits while ``MOST_BYTES`` of operations
        up to its own place are in flight.
        """
        if not operation.bytes_out:
            return True
        ahead = 0
        for other in self._operations:
            ahead += other.bytes_out
            if other is operation:
                break
        return ahead < MOST_BYTES


_NUM_TAGS = 32767  # tags of one communicator, below the largest that every MPI has


class MessagePassing(ABC):
    """What a library offers on one communicator: what algorithms are made of.

    hosts: the name of each rank's host. scheduler: of all communicators of this rank, which share
    its wires. inside: of this communicator's messages within a host, which are on no wire.
    scratch: memory for operations under way on this communicator.
    """

    def __init__(self, *, rank: int, hosts: tuple[str, ...], scheduler: SendScheduler) -> None:
        self.rank, self.size, self.hosts = rank, len(hosts), hosts
        self.scheduler, self.inside, self.scratch = scheduler, SendScheduler(), Scratch()
        self._num_tags = 0
        self._reserved: int | None = None

    def next_tag(self) -> int:
        """A tag for the messages of one operation; the same on every rank."""
        if self._reserved is not None:
            tag, self._reserved = self._reserved, None
            return tag
        self._num_tags += 1
        return self._num_tags % _NUM_TAGS

    def reserve(self) -> AbstractContextManager[None]:
        """As in ``Collectives``: the next tag belongs to the operation that starts in the block."""
        return self._under(self.next_tag())

    @contextmanager
    def _under(self, tag: int) -> Iterator[None]:
        self._reserved = tag
        yield
        assert self._reserved is None, "no operation has started in its place"

    @abstractmethod
    def start_send(self, buffer: Buffer, destination: int, tag: int) -> Request:
        """Send ``buffer`` to one rank."""

    @abstractmethod
    def start_receive(self, buffer: Buffer, source: int, tag: int) -> Request:
        """Receive into ``buffer`` from one rank."""

    @abstractmethod
    def check_addable(self, buffer: Buffer) -> None:
        """Raise ConfigError unless the library can add elements of the dtype of ``buffer``."""

    @abstractmethod
    def start_library_reduce_scatter(self, buffer: Buffer, total: Buffer, cuts: Cuts) -> Request:
        """The library's own reduce-scatter: this rank's shard of the sum, into ``total``."""

    @abstractmethod
    def start_library_all_gather(self, buffer: Buffer, cuts: Cuts) -> Request:
        """The library's own all-gather, in place."""


class Algorithm(Protocol):
    """One algorithm on one communicator, of two ranks or more.

    all_gather: the algorithm whose all-gather this one takes; its own, or another's.
    """

    all_gather: ClassVar[ReduceScatter]

    def __init__(self, transport: MessagePassing) -> None: ...

    def start_reduce_scatter(self, buffer: Buffer, cuts: Cuts, *, carrier: Buffer) -> Request:
        """Sum ``buffer`` over the ranks; this rank's shard of it then holds its shard of the sum.

        carrier: a buffer of the dtype to send in; ``buffer`` itself to send as it is.
        """
        ...

    def start_all_gather(self, buffer: Buffer, cuts: Cuts) -> Request:
        """Fill ``buffer`` with every rank's shard of it, in place."""
        ...
