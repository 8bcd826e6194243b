"""Shard: the elements of a bucket that this rank owns, where the optimizer works on them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from dearmpi.comm.api.collectives import Completed, Request
from dearmpi.engine.bucket.bucket import BucketRuntime


class Shard(Protocol):
    """1-D tensors, without padding; the last ranks may own none.

    start: the first element, in the bucket's flat buffer.
    parameters: the stored values; what a step writes here, ``send_back`` makes the bucket's.
    """

    start: int
    parameters: Tensor

    @property
    def gradients(self) -> Tensor:
        """The averages, once what ``start_fetch`` began is complete."""
        ...

    def start_fetch(self) -> Request:
        """Bring parameters and reduced gradients here."""
        ...

    def send_back(self) -> None:
        """Queue the way back of the parameters."""
        ...


class ResidentShard:
    """A part of the bucket's flat buffers, which stays there."""

    def __init__(self, bucket: BucketRuntime, *, rank: int) -> None:
        assert bucket.parameters is not None
        self.start, _ = bucket.spec.shard_range(rank)
        self.parameters = bucket.parameters.shard
        self._bucket = bucket

    @property
    def gradients(self) -> Tensor:
        """Of a buffer that is made when the first gradient is expected."""
        return self._bucket.gradients.shard

    def start_fetch(self) -> Request:
        """Everything is here."""
        return Completed()

    def send_back(self) -> None:
        """Everything is there."""
