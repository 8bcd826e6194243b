"""The routes from a device's memory to MPI.

- ``StagedCollectives``: by way of pinned host memory, in chunks. A chunk leaves on one stream, goes
  over MPI, and comes back on another. So copies of one chunk run beside the network's work on the
  next. The host waits for none of it.
- ``DirectCollectives``: MPI takes device memory, but knows nothing of streams. It gets memory only
  after the events behind which it is written. What collectives compute themselves, such as the sums
  of a ring, is over when it returns.
- ``AloneDeviceCollectives``: of one rank, whose sum is there already; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dearmpi.comm.api.collectives import Collectives, Completed, Request
from dearmpi.config import MIB
from dearmpi.cuts import Cuts
from dearmpi.device.accelerator import Device, DeviceEvent, Stream
from dearmpi.device.comm_stream import DeviceCommStream
from dearmpi.device.device_collectives import (
    DeviceCollectives,
    DeviceTransfer,
    Start,
    StartCut,
    TransferRequest,
)


class PinnedPieces:
    """Pieces of equal size. One that was copied from is free once the device has read it."""

    def __init__(self, device: Device, *, num: int, nbytes: int) -> None:
        """Raises DeviceError if the memory cannot be had."""
        self._free: list[tuple[Tensor, DeviceEvent | None]] = [
            (device.new_pinned(nbytes), None) for _ in range(num)
        ]
        self.nbytes = nbytes

    def take(self) -> Tensor | None:
        """A piece that nobody uses; None if there is none at the moment."""
        for place, (piece, event) in enumerate(self._free):
            if event is None or event.query():
                del self._free[place]
                return piece
        return None

    def give_back(self, piece: Tensor, event: DeviceEvent | None = None) -> None:
        """``piece`` is free after ``event``, or at once."""
        self._free.append((piece, event))


def as_rows(piece: Tensor, dtype: torch.dtype, *, rows: int, columns: int) -> Tensor:
    """The first bytes of ``piece`` as a matrix."""
    return piece[: rows * columns * dtype.itemsize].view(dtype).view(rows, columns)


CHUNK_BYTES = 8 * MIB
NUM_AHEAD = 2  # pieces beyond the window: one on its way out, one on its way in
_WIDEST = 16  # bytes of an element


@dataclass(frozen=True, slots=True)
class StagedChunk:
    """What goes over MPI at once: pairs of device and host memory, and how it starts."""

    out: Sequence[tuple[Tensor, Tensor]]
    back: Sequence[tuple[Tensor, Tensor]]
    start: Callable[[], Request]


class StagedCollectives(DeviceCollectives):
    """Pinned memory is of ``window`` and ``NUM_AHEAD`` pieces, whatever the buffers are."""

    def __init__(
        self,
        collectives: Collectives,
        comm_stream: DeviceCommStream,
        *,
        window: int,
        most_bytes: int,
    ) -> None:
        """``most_bytes``: of the largest buffer."""
        super().__init__(collectives, comm_stream, window=window)
        self._out, self._back = self._device.new_stream(), self._device.new_stream()
        nbytes = max(min(CHUNK_BYTES, most_bytes), self.size * _WIDEST)
        self._pieces = PinnedPieces(self._device, num=window + NUM_AHEAD, nbytes=nbytes)

    def _cross(self, rows: Tensor, start: Start, *, out: slice, back: slice) -> Request:
        """Some columns at a time."""
        columns = max(1, self._pieces.nbytes // (len(rows) * rows.element_size()))

        def lay(chunk: Tensor, piece: Tensor) -> StagedChunk:
            host = as_rows(piece, chunk.dtype, rows=len(chunk), columns=chunk.shape[1])
            flat = host.view(-1)
            there, here = [(chunk[out], host[out])], [(chunk[back], host[back])]
            return StagedChunk(there, here, lambda: start(flat))

        lays = [partial(lay, chunk) for chunk in rows.split(columns, dim=1)]
        return self._transfer_all(rows, lays)

    def _cross_cut(
        self, buffer: Tensor, cuts: Cuts, start: StartCut, *, out: slice, back: slice
    ) -> Request:
        """An equal part of each shard at a time."""
        most = max(1, self._pieces.nbytes // buffer.element_size() - self.size)
        num = min(cuts.total, -(-cuts.total // most))

        def lay(parts: list[Tensor], piece: Tensor) -> StagedChunk:
            chunk = Cuts((0, *accumulate(part.numel() for part in parts)))
            flat = as_rows(piece, buffer.dtype, rows=1, columns=chunk.total)[0]
            pairs = [(part, flat[chunk.slice_of(rank)]) for rank, part in enumerate(parts)]
            return StagedChunk(pairs[out], pairs[back], lambda: start(flat, chunk))

        lays = []
        for number in range(num):
            parts = []
            for rank in range(self.size):
                first, length = cuts.offsets[rank], cuts.size_of(rank)
                begin, end = (length * place // num for place in (number, number + 1))
                parts.append(buffer[first + begin : first + end])
            if any(part.numel() for part in parts):
                lays.append(partial(lay, parts))
        return self._transfer_all(buffer, lays)

    def _transfer_all(
        self, buffer: Tensor, lays: Sequence[Callable[[Tensor], StagedChunk]]
    ) -> Request:
        """lays: by chunk, how it lies in a piece."""
        request = TransferRequest(self._drive_for, len(lays))
        written = list(self._comm_stream.take_written(buffer))
        for lay in lays:
            self._queue.submit(self._transfer(lay, request, written))
        self._drive()
        return request

    def _transfer(
        self,
        lay: Callable[[Tensor], StagedChunk],
        request: TransferRequest,
        written: list[DeviceEvent],
    ) -> DeviceTransfer:
        """``written``: what the first chunk to leave waits for, and the others behind it."""
        piece: Tensor
        chunk: StagedChunk

        def leave() -> DeviceEvent | None:
            nonlocal piece, chunk
            taken = self._pieces.take()
            if taken is None:
                return None
            piece = taken
            while written:  # not before its turn: the chunks of others wait for less
                self._out.wait_event(written.pop())
            chunk = lay(piece)
            for there, here in chunk.out:
                self._device.copy(there, into=here, stream=self._out)
            event: DeviceEvent = self._out.record_event()
            return event

        def land() -> None:
            for there, here in chunk.back:
                self._device.copy(here, into=there, stream=self._back)
            event = self._back.record_event()
            self._pieces.give_back(piece, event)
            if request.landed():
                self._comm_stream.await_landing(event)

        return DeviceTransfer(leave, lambda: request.post(chunk.start), land)


class SettledBuffer:
    """A device's tensor to collectives: every operation on it is over when it returns.

    The calling thread, which drives progress, waits for that operation alone: ``stream`` has no
    other work.
    """

    def __init__(self, tensor: Tensor, device: Device, stream: Stream) -> None:
        self.tensor, self._device, self._stream = tensor, device, stream

    @property
    def dtype(self) -> Any:
        """The tensor's dtype."""
        return self.tensor.dtype

    @property
    def device(self) -> Any:
        """Where the tensor is."""
        return self.tensor.device

    def __getitem__(self, index: Any) -> SettledBuffer:
        return self._like(self.tensor[index])

    def data_ptr(self) -> int:
        """The device's address of the first element."""
        return self.tensor.data_ptr()

    def numel(self) -> int:
        """Number of elements."""
        return self.tensor.numel()

    def is_contiguous(self) -> bool:
        """Whether its elements lie side by side, in order."""
        return self.tensor.is_contiguous()

    def element_size(self) -> int:
        """Bytes per element."""
        return self.tensor.element_size()

    def new_empty(self, size: int) -> SettledBuffer:
        """Uninitialised memory of the device."""
        return self._settle(lambda: self.tensor.new_empty(size))

    def clone(self) -> SettledBuffer:
        """A copy."""
        return self._settle(self.tensor.clone)

    def copy_(self, source: SettledBuffer) -> SettledBuffer:
        """Overwrite with ``source``."""
        return self._settle(lambda: self.tensor.copy_(source.tensor))

    def add_(self, other: SettledBuffer) -> SettledBuffer:
        """Add ``other`` in place."""
        return self._settle(lambda: self.tensor.add_(other.tensor))

    def float(self) -> SettledBuffer:
        """In fp32."""
        return self._settle(self.tensor.float)

    def half(self) -> SettledBuffer:
        """In fp16."""
        return self._settle(self.tensor.half)

    def bfloat16(self) -> SettledBuffer:
        """In bf16."""
        return self._settle(self.tensor.bfloat16)

    def _settle(self, operation: Callable[[], Tensor]) -> SettledBuffer:
        with self._device.on(self._stream):
            result = operation()
        self._stream.synchronize()
        return self._like(result)

    def _like(self, tensor: Tensor) -> SettledBuffer:
        return SettledBuffer(tensor, self._device, self._stream)


@dataclass(frozen=True, slots=True)
class AllEvents:
    """The moment when all of several have passed."""

    events: tuple[DeviceEvent, ...]

    def query(self) -> bool:
        """Whether all have."""
        return all(event.query() for event in self.events)


class DirectCollectives(DeviceCollectives):
    """No copies: whole buffers, in the order in which they were asked for."""

    def __init__(
        self, collectives: Collectives, comm_stream: DeviceCommStream, *, window: int
    ) -> None:
        super().__init__(collectives, comm_stream, window=window)
        self._stream = self._device.new_stream()

    def _cross(self, rows: Tensor, start: Start, *, out: slice, back: slice) -> Request:
        """What goes out and what comes back is MPI's affair."""
        request = TransferRequest(self._drive_for, 1)
        written = AllEvents(self._comm_stream.take_written(rows))
        buffer = SettledBuffer(rows.view(-1), self._device, self._stream)
        post = partial(request.post, partial(start, buffer))
        self._queue.submit(DeviceTransfer(lambda: written, post, request.landed))
        self._drive()
        return request

    def _cross_cut(
        self, buffer: Tensor, cuts: Cuts, start: StartCut, *, out: slice, back: slice
    ) -> Request:
        """All of it at once."""
        return self._cross(buffer, lambda sent: start(sent, cuts), out=out, back=back)


class AloneDeviceCollectives(DeviceCollectives):
    """``DeviceCollectives`` for a single rank."""

    def _cross(self, rows: Tensor, start: Start, *, out: slice, back: slice) -> Request:
        """What is queued to the ``CommStream`` from now on waits until ``rows`` are written."""
        for event in self._comm_stream.take_written(rows):
            self._comm_stream.await_landing(event)
        return Completed()

    def _cross_cut(
        self, buffer: Tensor, cuts: Cuts, start: StartCut, *, out: slice, back: slice
    ) -> Request:
        """As of even shards."""
        return self._cross(buffer, lambda sent: start(sent, cuts), out=out, back=back)
