"""Shard: the part of a bucket that this rank's optimizer works on.

- ``ResidentShard``: where the bucket is.
- ``HostShard``: of a device, in pinned host memory, where the optimizer steps on the CPU. Before a
  step gradients and parameters are copied here, and after it the parameters back. For the first the
  progress thread waits, by polling; for the second nobody does.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from dearmpi.comm.api.collectives import Completed, Request
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.device.accelerator import Device, DeviceEvent, failures_of
from dearmpi.engine.device.comm_stream import DeviceCommStream
from dearmpi.engine.device.routes import PinnedPieces, as_rows

NUM_FETCHED = 2  # shards at once: the optimizer works on one while the next is on its way


class Shard(Protocol):
    """1-D tensors, without padding; the last ranks may own none.

    start: the first element, in the bucket's flat buffer.
    parameters: the stored values; what a step writes here, ``send_back`` makes the bucket's.
    shown: of compressed parameters, where it is kept what replicas show of them.
    """

    start: int
    parameters: Tensor
    shown: Tensor | None

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
        self.parameters, self.shown = bucket.parameters.shard, bucket.shown
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


class HostMemory:
    """What all host shards share.

    comm_stream: what is there once all that is queued here is done is fetched, and sent back to.
    out: the stream of the copies to the host. pieces: room for ``NUM_FETCHED`` shards' gradients.
    """

    def __init__(self, comm_stream: DeviceCommStream, *, most_bytes: int) -> None:
        """``most_bytes``: of the largest shard. Raises DeviceError if that cannot be pinned."""
        self.comm_stream, self.out = comm_stream, comm_stream.device.new_stream()
        self.pieces = PinnedPieces(comm_stream.device, num=NUM_FETCHED, nbytes=most_bytes)


class HostShard:
    """``Shard`` of a bucket on a device.

    parameters: old values, until the fetch; other changes go to the bucket.
    """

    def __init__(self, bucket: BucketRuntime, *, rank: int, memory: HostMemory) -> None:
        """Raises DeviceError if there is no pinned memory for the parameters."""
        assert bucket.parameters is not None
        self.start, _ = bucket.spec.shard_range(rank)
        self._bucket, self._memory = bucket, memory
        self._there = bucket.parameters.shard
        pinned = memory.comm_stream.device.new_pinned(self._there.nbytes)
        self.parameters = pinned.view(self._there.dtype)
        self.shown: Tensor | None = None  # what is on a device is not compressed
        self._piece: Tensor | None = None

    @property
    def gradients(self) -> Tensor:
        """Until ``send_back``."""
        assert self._piece is not None, "no gradients were fetched"
        return as_rows(self._piece, self._there.dtype, rows=1, columns=self._there.numel())[0]

    def start_fetch(self) -> Request:
        """Queue the copies."""
        memory, device = self._memory, self._memory.comm_stream.device
        self._piece = memory.pieces.take()
        with failures_of(device):
            memory.out.wait_event(memory.comm_stream.mark())
            for source, room in (
                (self._bucket.gradients.shard, self.gradients),
                (self._there, self.parameters),
            ):
                device.copy(source, into=room, stream=memory.out)
            return Fetch(device, memory.out.record_event())

    def send_back(self) -> None:
        """Queue the copy; the next fetch waits for it on the device."""
        assert self._piece is not None, "no gradients were fetched"
        with failures_of(self._memory.comm_stream.device):
            self._memory.comm_stream.copy(self.parameters, into=self._there)
        self._memory.pieces.give_back(self._piece)
        self._piece = None


class Fetch(Request):
    """Copies under way to the host, as a request that is complete when they are."""

    def __init__(self, device: Device, event: DeviceEvent) -> None:
        self._device, self._event = device, event

    def test(self) -> bool:
        """Raises CommError if the device has failed."""
        with failures_of(self._device):
            return self._event.query()
