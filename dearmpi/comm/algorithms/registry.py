"""Registry: all algorithms by name, and the collectives of a library that carry them out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from dearmpi.comm.algorithms.algorithm import Algorithm
from dearmpi.comm.algorithms.exchange import ExchangeAlgorithm
from dearmpi.comm.algorithms.native import NativeAlgorithm
from dearmpi.comm.algorithms.ring import RingAlgorithm
from dearmpi.comm.algorithms.scratch import Scratch, ScratchRequest, carrier_of, copy
from dearmpi.comm.algorithms.send_scheduler import SendScheduler
from dearmpi.comm.api.collectives import Buffer, Collectives, Completed, Request, even_shards
from dearmpi.config import ReduceScatter, WireDtype
from dearmpi.cuts import Cuts

ALGORITHMS: dict[ReduceScatter, type[Algorithm]] = {
    "native": NativeAlgorithm,
    "ring": RingAlgorithm,
    "exchange": ExchangeAlgorithm,
}

_NUM_TAGS = 32767  # tags of one communicator, below the largest that every MPI has

Operation = Callable[[Buffer, Collectives], Request]


@dataclass(frozen=True, slots=True)
class CollectiveAlgorithms:
    """How an optimizer reduces and gathers: an algorithm by name, and the dtype on the wire.

    wire_dtype: in what both operations send a wider buffer; None: as it is.
    The engine and all that measures for it start their collectives here.
    """

    reduce_scatter: ReduceScatter
    wire_dtype: WireDtype | None = None

    @property
    def all_gather(self) -> ReduceScatter:
        """The algorithm of the all-gather that belongs to the reduce-scatter."""
        return ALGORITHMS[self.reduce_scatter].all_gather

    @property
    def can_reduce(self) -> bool:
        """False where the library would have to add half precision."""
        return self.wire_dtype is None or not ALGORITHMS[self.reduce_scatter].library_adds

    def start_reduce_scatter(self, buffer: Buffer, collectives: Collectives) -> Request:
        """Post the reduce-scatter of ``buffer``."""
        return collectives.start_reduce_scatter(
            buffer, self.reduce_scatter, wire_dtype=self.wire_dtype
        )

    def start_all_gather(self, buffer: Buffer, collectives: Collectives) -> Request:
        """Post the all-gather of ``buffer``."""
        return collectives.start_all_gather(buffer, self.all_gather, wire_dtype=self.wire_dtype)


class AlgorithmCollectives(ABC):
    """The two operations of ``Collectives`` that have algorithms, on one communicator.

    A library's subclass is the ``Transport`` of the algorithms.
    """

    def __init__(self, *, rank: int, hosts: tuple[str, ...], scheduler: SendScheduler) -> None:
        """``hosts``: of each rank. ``scheduler``: of all communicators of this rank."""
        self.rank, self.size, self.hosts = rank, len(hosts), hosts
        self.scheduler, self.scratch = scheduler, Scratch()
        self._num_tags = 0

    def start_reduce_scatter(
        self, buffer: Buffer, algorithm: ReduceScatter, *, wire_dtype: WireDtype | None = None
    ) -> Request:
        """Sum ``buffer`` over the ranks into this rank's shard of it."""
        cuts = even_shards("reduce-scatter", buffer, self.size)
        if self.size == 1:
            return Completed()
        carrier = carrier_of(buffer, wire_dtype)
        return self._algorithms[algorithm].start_reduce_scatter(buffer, cuts, carrier=carrier)

    def start_all_gather(
        self,
        buffer: Buffer,
        algorithm: ReduceScatter = "native",
        *,
        wire_dtype: WireDtype | None = None,
    ) -> Request:
        """Fill ``buffer`` with every rank's shard of it, in place."""
        cuts = even_shards("all-gather", buffer, self.size)
        if self.size == 1:
            return Completed()
        start = self._algorithms[algorithm].start_all_gather
        carrier = carrier_of(buffer, wire_dtype)
        if carrier is buffer:
            return start(buffer, cuts)
        held = self.scratch.take(carrier, cuts.total)
        sent, own = held[: cuts.total], cuts.slice_of(self.rank)
        sent[own].copy_(buffer[own])
        # The own shard too, so that all ranks hold the same.
        finish = partial(copy, sent, into=buffer)
        return ScratchRequest(self.scratch, start(sent, cuts), held=[held], finish=finish)

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

    @abstractmethod
    def start_all_to_all(self, sent: Buffer, arrived: Buffer, cuts: Cuts) -> Request:
        """Send each rank its shard of ``sent``; the shards from all ranks fill ``arrived``."""

    @cached_property
    def _algorithms(self) -> dict[ReduceScatter, Algorithm]:
        return {name: algorithm(self) for name, algorithm in ALGORITHMS.items()}
