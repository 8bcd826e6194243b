"""A world of one: collectives without communication, for machines without an MPI library."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from dearmpi.comm.api.collectives import Buffer, Completed, ReduceOp, Request
from dearmpi.config import ReduceScatter, WireDtype
from dearmpi.cuts import Cuts
from dearmpi.grid import Grid


class AloneCollectives:
    """``Collectives`` for a single rank."""

    rank = 0
    size = 1

    @property
    def hosts(self) -> tuple[str, ...]:
        return (socket.gethostname(),)

    def start_reduce_scatter(
        self,
        buffer: Buffer,
        algorithm: ReduceScatter | Grid,
        *,
        wire_dtype: WireDtype | None = None,
        cuts: Cuts | None = None,
    ) -> Request:
        return Completed()

    def start_all_gather(
        self,
        buffer: Buffer,
        algorithm: ReduceScatter | Grid = "native",
        *,
        wire_dtype: WireDtype | None = None,
        cuts: Cuts | None = None,
    ) -> Request:
        return Completed()

    def start_exchange(self, sent: Buffer, arrived: Buffer, *, cuts: Cuts | None = None) -> Request:
        return Completed()

    def reserve(self) -> AbstractContextManager[None]:
        return nullcontext()

    def start_all_reduce(self, buffer: Buffer, op: ReduceOp) -> Request:
        return Completed()

    def start_broadcast(self, buffer: Buffer, root: int) -> Request:
        return Completed()

    def start_duplicate(self) -> tuple[AloneCollectives, Request]:
        return AloneCollectives(), Completed()

    def make_group(self, ranks: Sequence[int], number: int) -> AloneCollectives:
        return AloneCollectives()

    def free(self) -> None:
        """Nothing to give back."""

    def start_message(self, data: bytes, destination: int) -> Request:
        return Completed()

    def receive_message(self) -> tuple[int, bytes] | None:
        return None

    def abort(self, code: int) -> None:
        os._exit(code)
