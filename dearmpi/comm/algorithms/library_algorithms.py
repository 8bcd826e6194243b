"""Algorithms of the library's own operations: its reduce-scatter and all-gather, and an exchange by
all-to-all with a local sum, for few ranks and half precision.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from dearmpi.comm.algorithms.algorithm import MessagePassing
from dearmpi.comm.algorithms.ring import RingAlgorithm
from dearmpi.comm.algorithms.scratch import ScratchRequest, add_in_order, copy
from dearmpi.comm.api.collectives import Buffer, Request
from dearmpi.config import ReduceScatter
from dearmpi.cuts import Cuts


class NativeAlgorithm:
    """``Algorithm`` by one operation of the library each way."""

    library_adds: ClassVar[bool] = True
    all_gather: ClassVar[ReduceScatter] = "native"

    def __init__(self, transport: MessagePassing) -> None:
        self._transport = transport

    def start_reduce_scatter(self, buffer: Buffer, cuts: Cuts, *, carrier: Buffer) -> Request:
        """Sum into scratch memory of a shard, which is then copied to the shard.

        Raises ConfigError if the library cannot add elements of the dtype of ``carrier``.
        """
        transport = self._transport
        transport.check_addable(carrier)
        numel = cuts.size_of(transport.rank)
        held = transport.scratch.take(buffer, numel)
        total = held[:numel]
        finish = partial(copy, total, into=buffer[cuts.slice_of(transport.rank)])
        request = transport.start_library_reduce_scatter(buffer, total, cuts)
        return ScratchRequest(transport.scratch, request, held=[held], finish=finish)

    def start_all_gather(self, buffer: Buffer, cuts: Cuts) -> Request:
        """In place, without scratch memory."""
        return self._transport.start_library_all_gather(buffer, cuts)


class ExchangeAlgorithm:
    """``Algorithm`` by which each rank receives its shard from all others and adds them in rank
    order. Half precision is rounded once for each rank. Gathers around a ring.
    """

    library_adds: ClassVar[bool] = False
    all_gather: ClassVar[ReduceScatter] = "ring"

    def __init__(self, transport: MessagePassing) -> None:
        self._transport = transport
        self._ring = RingAlgorithm(transport)

    def start_reduce_scatter(self, buffer: Buffer, cuts: Cuts, *, carrier: Buffer) -> Request:
        """Takes scratch memory as large as the buffer, twice that to send another dtype."""
        transport, scratch = self._transport, self._transport.scratch
        held = [scratch.take(carrier, cuts.total)]
        sent, arrived = buffer, held[0][: cuts.total]
        if carrier is not buffer:
            held.append(scratch.take(carrier, cuts.total))
            sent = held[1][: cuts.total]
            copy(buffer, into=sent)
        parts = [arrived[cuts.slice_of(rank)] for rank in range(transport.size)]
        finish = partial(add_in_order, parts, into=buffer[cuts.slice_of(transport.rank)])
        request = transport.start_all_to_all(sent, arrived, cuts)
        return ScratchRequest(scratch, request, held=held, finish=finish)

    def start_all_gather(self, buffer: Buffer, cuts: Cuts) -> Request:
        return self._ring.start_all_gather(buffer, cuts)
