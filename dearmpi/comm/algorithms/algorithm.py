"""Algorithm: a reduce-scatter and an all-gather that belong together.

A new one is a class in a file of its own. It takes its name in ``config.ReduceScatter``, a line in
``registry.ALGORITHMS``, and its cost in ``plan/model/cost.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from dearmpi.comm.algorithms.scratch import Scratch
from dearmpi.comm.algorithms.send_scheduler import SendScheduler
from dearmpi.comm.api.collectives import Buffer, Request
from dearmpi.config import ReduceScatter
from dearmpi.cuts import Cuts

_NUM_TAGS = 32767  # tags of one communicator, below the largest that every MPI has


class MessagePassing(ABC):
    """What a library offers on one communicator: what algorithms are made of.

    hosts: the name of each rank's host. scheduler: of all communicators of this rank, which share
    its wires. scratch: memory for operations under way on this communicator.
    """

    def __init__(self, *, rank: int, hosts: tuple[str, ...], scheduler: SendScheduler) -> None:
        self.rank, self.size, self.hosts = rank, len(hosts), hosts
        self.scheduler, self.scratch = scheduler, Scratch()
        self._num_tags = 0

    def next_tag(self) -> int:
        """A tag for the messages of one operation; the same on every rank."""
        self._num_tags += 1
        return self._num_tags % _NUM_TAGS

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

    library_adds: whether the library forms the sums, which it cannot do in half precision.
    all_gather: the algorithm whose all-gather this one takes; its own, or another's.
    """

    library_adds: ClassVar[bool]
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
