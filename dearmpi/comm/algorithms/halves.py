"""Halves: the reduce-scatter and the all-gather that an all-reduce is split into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dearmpi.comm.api.collectives import Buffer, Collectives, Request
from dearmpi.config import AllGather, ReduceScatter, WireDtype

Operation = Callable[[Buffer, Collectives], Request]


@dataclass(frozen=True, slots=True)
class Halves:
    """The algorithms that go together, and in what both send a wider buffer; None: as it is.

    Whoever measures what the engine does, or is to do, takes them from here as the engine does.
    """

    reduce_scatter: ReduceScatter
    wire_dtype: WireDtype | None = None

    @property
    def all_gather(self) -> AllGather:
        """The one that goes with the reduce-scatter: both of MPI's own, or both of ours."""
        return "native" if self.reduce_scatter == "native" else "ring"

    @property
    def can_reduce(self) -> bool:
        """MPI has no portable sum in half precision."""
        return self.reduce_scatter != "native" or self.wire_dtype is None

    def start_reduce(self, buffer: Buffer, collectives: Collectives) -> Request:
        """Post the reduce-scatter of ``buffer``."""
        return collectives.start_reduce_scatter(
            buffer, self.reduce_scatter, wire_dtype=self.wire_dtype
        )

    def start_gather(self, buffer: Buffer, collectives: Collectives) -> Request:
        """Post the all-gather of ``buffer``."""
        return collectives.start_all_gather(buffer, self.all_gather, wire_dtype=self.wire_dtype)
