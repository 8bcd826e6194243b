"""Exchange: every rank sends each other rank its shard, and adds what it receives itself.

In round s a rank sends to the one s places after it, and receives from the one s places before.
So senders never meet at a receiver, as they do in an all-to-all of a library.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from dearmpi.comm.algorithms.algorithm import MessagePassing, Priority
from dearmpi.comm.algorithms.ring import (
    Chunks,
    RingAlgorithm,
    RingContext,
    Rounds,
    contexts_on,
)
from dearmpi.comm.algorithms.scratch import ScratchRequest, add_in_order, copy
from dearmpi.comm.api.collectives import Buffer, Request
from dearmpi.config import ReduceScatter
from dearmpi.cuts import Cuts, even_cuts


class RotatedExchange(Rounds):
    """Shard r of ``sent`` goes to rank r; shard r of ``arrived`` comes from rank r, but for the own
    one, which is left as it is.

    ``arrived`` has a shard from each rank, each as long as the own shard of ``sent``.
    """

    priority = Priority.REDUCE_SCATTER

    def __init__(self, context: RingContext, sent: Buffer, arrived: Buffer, cuts: Cuts) -> None:
        self._sent_buffer, self._arrived_buffer = sent, arrived
        width, size = sent.element_size(), context.size
        after = [context.rank_at(context.place + index) for index in range(1, size)]
        before = [context.rank_at(context.place - index) for index in range(1, size)]
        self._outgoing_chunks = Chunks(cuts, after, element_size=width)
        arrives = cuts if cuts.is_even else arrival_cuts(cuts, context.rank_at(context.place))
        self._incoming_chunks = Chunks(arrives, before, element_size=width)
        super().__init__(
            context,
            cuts,
            element_size=width,
            num_sends=len(self._outgoing_chunks),
            num_takes=len(self._incoming_chunks),
        )

    def _num_ready(self) -> int:
        return self._num_sends

    def _send_distance(self, number: int) -> int:
        return 1 + self._outgoing_chunks.index_of(number)

    def _receive_distance(self, number: int) -> int:
        return 1 + self._incoming_chunks.index_of(number)

    def _outgoing(self, number: int) -> Any:
        return self._sent_buffer[self._outgoing_chunks.slice_of(number)]

    def _incoming(self, number: int) -> Any:
        return self._arrived_buffer[self._incoming_chunks.slice_of(number)]

    def _take(self, number: int) -> None:
        """Nothing to do: it was received in place."""


def arrival_cuts(cuts: Cuts, rank: int) -> Cuts:
    """Where the parts lie that ``rank`` receives for its own shard, one from each rank."""
    return even_cuts(cuts.size_of(rank) * cuts.num_ranks, cuts.num_ranks)


class ExchangeAlgorithm:
    """``Algorithm`` by which each rank receives its shard from all others and adds them in rank
    order. Half precision is rounded once for each rank. Gathers around a ring.
    """

    all_gather: ClassVar[ReduceScatter] = "ring"

    def __init__(self, transport: MessagePassing) -> None:
        self._transport = transport
        self._next_context = contexts_on(transport)
        self._ring = RingAlgorithm(transport)

    def start_reduce_scatter(self, buffer: Buffer, cuts: Cuts, *, carrier: Buffer) -> Request:
        """Takes scratch memory for the own shard of each rank, and as much as the buffer has to
        send another dtype.
        """
        transport, scratch = self._transport, self._transport.scratch
        arrives = arrival_cuts(cuts, transport.rank)
        held = [scratch.take(carrier, arrives.total)]
        sent, arrived = buffer, held[0][: arrives.total]
        if carrier is not buffer:
            held.append(scratch.take(carrier, cuts.total))
            sent = held[1][: cuts.total]
            copy(buffer, into=sent)
        own = cuts.slice_of(transport.rank)
        copy(sent[own], into=arrived[arrives.slice_of(transport.rank)])
        parts = [arrived[arrives.slice_of(rank)] for rank in range(transport.size)]
        finish = partial(add_in_order, parts, into=buffer[own])
        request = RotatedExchange(self._next_context(), sent, arrived, cuts)
        return ScratchRequest(scratch, request, held=held, finish=finish)

    def start_all_gather(self, buffer: Buffer, cuts: Cuts) -> Request:
        return self._ring.start_all_gather(buffer, cuts)
