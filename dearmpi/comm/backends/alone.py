"""A world of one: collectives without communication, for machines without an MPI library."""

from __future__ import annotations

import os
import socket

from dearmpi.comm.api.collectives import Buffer, Completed, ReduceOp, Request
from dearmpi.config import ReduceScatter, WireDtype


class AloneCollectives:
    """``Collectives`` for a single rank."""

    rank = 0
    size = 1

    @property
    def hosts(self) -> tuple[str, ...]:
        """The name of this host."""
        return (socket.gethostname(),)

    def start_reduce_scatter(
        self, buffer: Buffer, algorithm: ReduceScatter, *, wire_dtype: WireDtype | None = None
    ) -> Request:
        """The sum over one rank is there already."""
        return Completed()

    def start_all_gather(
        self,
        buffer: Buffer,
        algorithm: ReduceScatter = "native",
        *,
        wire_dtype: WireDtype | None = None,
    ) -> Request:
        """The only shard is the whole."""
        return Completed()

    def start_all_reduce(self, buffer: Buffer, op: ReduceOp) -> Request:
        """The sum over one rank is there already."""
        return Completed()

    def start_broadcast(self, buffer: Buffer, root: int) -> Request:
        """The root is the only rank."""
        return Completed()

    def start_duplicate(self) -> tuple[AloneCollectives, Request]:
        """Another world of one."""
        return AloneCollectives(), Completed()

    def free(self) -> None:
        """Nothing to give back."""

    def start_message(self, data: bytes, destination: int) -> Request:
        """There is no other rank."""
        return Completed()

    def receive_message(self) -> tuple[int, bytes] | None:
        """There is no other rank."""
        return None

    def abort(self, code: int) -> None:
        """End the process."""
        os._exit(code)
