"""Exchange: every rank sends each other rank its shard, and adds what it receives itself.

In round s a rank sends to the one s places after it, and receives from the one s places before.
So senders never meet at a receiver, as they do in an all-to-all of a library.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from dearmpi.comm.algorithms.algorithm import MessagePassing, Priority
from dearmpi.comm.algorithms.ring import RingAlgorithm, RingContext, Rounds, contexts_on
from dearmpi.comm.algorithms.scratch import ScratchRequest, add_in_order, copy
from dearmpi.comm.api.collectives import Buffer, Request
from dearmpi.config import ReduceScatter
from dearmpi.cuts import Cuts


class RotatedExchange(Rounds):
    """Shard r of ``sent`` goes to rank r; shard r of ``arrived`` comes from rank r, but for the own
    one, which is left as it is.
    """

    priority = Priority.REDUCE_SCATTER

    def __init__(self, context: RingContext, sent: Buffer, arrived: Buffer, cuts: Cuts) -> None:
        self._arrived_buffer = arrived
        super().__init__(context, sent, cuts, element_size=sent.element_size())

    def _num_ready(self) -> int:
        return self._num_messages

    def _distance(self, number: int) -> int:
        return 1 + number // self._num_chunks

    def _outgoing(self, number: int) -> Any:
        place = self._context.place + self._distance(number)
        return self._buffer[self._chunk_of(place, number % self._num_chunks)]

    def _incoming(self, number: int) -> Any:
        place = self._context.place - self._distance(number)
        return self._arrived_buffer[self._chunk_of(place, number % self._num_chunks)]

    def _take(self, number: int) -> None:
        """Nothing to do: it was received in place."""


class ExchangeAlgorithm:
    """``Algorithm`` by which each rank receives its shard from all others and adds them in rank
    order. Half precision is rounded once for each rank. Gathers around a ring.
    """

    library_adds: ClassVar[bool] = False
    all_gather: ClassVar[ReduceScatter] = "ring"

    def __init__(self, transport: MessagePassing) -> None:
        self._transport = transport
        self._next_context = contexts_on(transport)
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
        own = cuts.slice_of(transport.rank)
        copy(sent[own], into=arrived[own])
        parts = [arrived[cuts.slice_of(rank)] for rank in range(transport.size)]
        finish = partial(add_in_order, parts, into=buffer[own])
        request = RotatedExchange(self._next_context(), sent, arrived, cuts)
        return ScratchRequest(scratch, request, held=held, finish=finish)

    def start_all_gather(self, buffer: Buffer, cuts: Cuts) -> Request:
        return self._ring.start_all_gather(buffer, cuts)
