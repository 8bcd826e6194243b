"""Algorithms: how a reduce-scatter or an all-gather is made of what a library offers.

What the library has by itself (``native``), sends and receives around a ring, or an all-to-all and
a local sum (``exchange``); in the buffer's own dtype, or a narrower one on the wire.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

from dearmpi.comm.algorithms.ring import (
    CHUNK_BYTES,
    RingAllGather,
    RingContext,
    RingReduceScatter,
    num_receives,
    ring_order,
)
from dearmpi.comm.algorithms.scratch import Scratch, ScratchRequest, add_in_order, carrier_of
from dearmpi.comm.algorithms.send_scheduler import SendScheduler
from dearmpi.comm.api.collectives import Buffer, Completed, Request
from dearmpi.comm.api.shard import check_shards, shard_of
from dearmpi.config import AllGather, ReduceScatter, WireDtype

_NUM_TAGS = 32767  # of rings: those below the largest that every MPI has


class Algorithms(ABC):
    """The two halves of ``Collectives`` that have several algorithms, for one communicator.

    A library adds the operations that they are made of.
    """

    def __init__(self, *, rank: int, hosts: tuple[str, ...], scheduler: SendScheduler) -> None:
        """``hosts``: of each rank. ``scheduler``: of all communicators of this rank, which
        use the same wires.
        """
        self.rank, self.size, self.hosts = rank, len(hosts), hosts
        self._order = ring_order(hosts)
        self._place = self._order.index(rank)
        self._scheduler = scheduler
        self._scratch = Scratch()
        self._num_started = 0

    def start_reduce_scatter(
        self, buffer: Buffer, algorithm: ReduceScatter, *, wire_dtype: WireDtype | None = None
    ) -> Request:
        """Sum ``buffer`` over the ranks into this rank's shard of it."""
        check_shards("reduce-scatter", buffer, self.size)
        if self.size == 1:
            return Completed()
        carrier = carrier_of(buffer, wire_dtype)
        if algorithm == "ring":
            return self._reduce_by_ring(buffer, carrier)
        if algorithm == "native":
            return self._reduce_natively(buffer, carrier)
        return self._reduce_by_exchange(buffer, carrier)

    def start_all_gather(
        self,
        buffer: Buffer,
        algorithm: AllGather = "native",
        *,
        wire_dtype: WireDtype | None = None,
    ) -> Request:
        """Fill ``buffer`` with every rank's shard of it, in place."""
        check_shards("all-gather", buffer, self.size)
        carrier = carrier_of(buffer, wire_dtype) if self.size > 1 else buffer
        if carrier is buffer:
            return self._gather(buffer, algorithm)
        room = self._scratch.take(carrier, buffer.numel())
        sent = room[: buffer.numel()]
        self._own_shard(sent).copy_(self._own_shard(buffer))
        # The own shard too, so that all ranks hold the same.
        finish = partial(_copy, sent, into=buffer)
        request = self._gather(sent, algorithm)
        return ScratchRequest(self._scratch, request, held=[room], finish=finish)

    @abstractmethod
    def start_send(self, buffer: Buffer, destination: int, tag: int) -> Request:
        """Send ``buffer`` to one rank."""

    @abstractmethod
    def start_receive(self, buffer: Buffer, source: int, tag: int) -> Request:
        """Receive into ``buffer`` from one rank."""

    @abstractmethod
    def _check_addable(self, carrier: Buffer) -> None:
        """Raise ConfigError unless the library can add elements of the dtype of ``carrier``."""

    @abstractmethod
    def _start_sum(self, buffer: Buffer, total: Buffer) -> Request:
        """The library's own reduce-scatter: this rank's shard of the sum, into ``total``."""

    @abstractmethod
    def _start_exchange(self, sent: Buffer, arrived: Buffer) -> Request:
        """Send each rank its shard of ``sent``; what ranks sent lies in ``arrived`` by rank."""

    @abstractmethod
    def _start_gather(self, buffer: Buffer) -> Request:
        """The library's own all-gather, in place."""

    def _gather(self, buffer: Buffer, algorithm: AllGather) -> Request:
        if algorithm == "ring" and self.size > 1:
            return RingAllGather(self._next_context(), buffer)
        return self._start_gather(buffer)

    def _next_context(self) -> RingContext:
        """Where the next ring runs, under a tag of its own."""
        self._num_started += 1
        tag = self._num_started % _NUM_TAGS
        return RingContext(self, self._order, self._place, tag=tag, scheduler=self._scheduler)

    def _reduce_by_ring(self, buffer: Buffer, carrier: Buffer) -> Request:
        shard_numel, width = buffer.numel() // self.size, carrier.element_size()
        numel = min(shard_numel, CHUNK_BYTES // width)
        num = num_receives(shard_numel, width, self.size)
        scratch = [self._scratch.take(carrier, numel) for _ in range(num)]
        outgoing = []
        if carrier is not buffer:
            outgoing = [self._scratch.take(carrier, numel) for _ in range(num)]
        ring = RingReduceScatter(self._next_context(), buffer, scratch=scratch, outgoing=outgoing)
        return ScratchRequest(self._scratch, ring, held=[*scratch, *outgoing])

    def _reduce_natively(self, buffer: Buffer, carrier: Buffer) -> Request:
        self._check_addable(carrier)
        numel = buffer.numel() // self.size
        room = self._scratch.take(buffer, numel)
        total = room[:numel]
        finish = partial(_copy, total, into=self._own_shard(buffer))
        request = self._start_sum(buffer, total)
        return ScratchRequest(self._scratch, request, held=[room], finish=finish)

    def _reduce_by_exchange(self, buffer: Buffer, carrier: Buffer) -> Request:
        numel = buffer.numel()
        held = [self._scratch.take(carrier, numel)]
        sent, arrived = buffer, held[0][:numel]
        if carrier is not buffer:
            held.append(self._scratch.take(carrier, numel))
            sent = held[1][:numel]
            _copy(buffer, into=sent)
        parts = [shard_of(arrived, rank, self.size) for rank in range(self.size)]
        finish = partial(add_in_order, parts, into=self._own_shard(buffer))
        request = self._start_exchange(sent, arrived)
        return ScratchRequest(self._scratch, request, held=held, finish=finish)

    def _own_shard(self, buffer: Buffer) -> Any:
        return shard_of(buffer, self.rank, self.size)


def _copy(source: Any, *, into: Any) -> None:
    into.copy_(source)
