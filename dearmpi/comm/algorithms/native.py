"""The algorithm of the library's own operations: its reduce-scatter and its all-gather."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from dearmpi.comm.algorithms.algorithm import MessagePassing
from dearmpi.comm.algorithms.scratch import ScratchRequest, copy
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
