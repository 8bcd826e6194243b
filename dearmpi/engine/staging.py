"""Staging: collectives on a device's tensors by way of pinned host memory.

A buffer goes in chunks: out on one stream, over MPI, and back on another, so that the copies of one
chunk run beside the network's work on the next. The host waits for none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from dearmpi.comm.api import Collectives, ReduceOp, Request
from dearmpi.config import ReduceScatter, WireDtype
from dearmpi.engine.device import MIB, Event
from dearmpi.engine.passage import Crossing, Passage
from dearmpi.engine.pinned import PinnedPieces, as_rows
from dearmpi.engine.side_stream import DeviceSideStream
from dearmpi.errors import CommError

CHUNK_BYTES = 4 * MIB
_WIDEST = 16  # bytes of an element
Start = Callable[[Tensor], Request]


class StagedRequest:
    """An operation in several crossings; complete once the last result is queued to the device."""

    def __init__(self, drive: Callable[[], None], num_left: int) -> None:
        self._drive = drive
        self._num_left = num_left

    def test(self) -> bool:
        """Drive all operations of the same collectives."""
        if self._num_left:
            self._drive()
        return not self._num_left

    def landed(self) -> bool:
        """Count a crossing that is over; True if it was the last."""
        self._num_left -= 1
        return not self._num_left


class StagedCollectives:
    """``Collectives`` for a device's tensors, over ``collectives`` of the host's.

    A result is ready for what is queued to ``side`` once its request is complete. Pinned memory is
    two pieces more than the window: one on its way out, one on its way in.
    """

    def __init__(
        self, collectives: Collectives, side: DeviceSideStream, *, window: int, most_bytes: int
    ) -> None:
        """``most_bytes``: of the largest buffer."""
        self._collectives = collectives
        self.rank, self.size, self.host = collectives.rank, collectives.size, collectives.host
        self._side, self._device = side, side.device
        self._out, self._back = self._device.new_stream(), self._device.new_stream()
        self._passage = Passage(window)
        nbytes = max(min(CHUNK_BYTES, most_bytes), self.size * _WIDEST)
        self._pieces = PinnedPieces(self._device, num=window + 2, nbytes=nbytes)

    def start_reduce_scatter(
        self, buffer: Tensor, algorithm: ReduceScatter, *, wire_dtype: WireDtype | None = None
    ) -> Request:
        """All shards go out, the own one comes back."""
        start = partial(_start_reduce_scatter, self._collectives, algorithm, wire_dtype)
        return self._cross(self._shards(buffer), start, out=slice(None), back=self._own)

    def start_all_gather(self, buffer: Tensor, *, wire_dtype: WireDtype | None = None) -> Request:
        """The own shard goes out, all come back."""
        start = partial(_start_all_gather, self._collectives, wire_dtype)
        return self._cross(self._shards(buffer), start, out=self._own, back=slice(None))

    def start_all_reduce(self, buffer: Tensor, op: ReduceOp) -> Request:
        """Everything goes both ways."""
        return self._cross_whole(buffer, lambda host: self._collectives.start_all_reduce(host, op))

    def start_broadcast(self, buffer: Tensor, root: int) -> Request:
        """Everything goes both ways."""
        return self._cross_whole(buffer, lambda host: self._collectives.start_broadcast(host, root))

    def start_duplicate(self) -> tuple[Collectives, Request]:
        """Of the host's collectives."""
        return self._collectives.start_duplicate()

    def free(self) -> None:
        """Give the host's collectives back."""
        self._collectives.free()

    def start_message(self, data: bytes, destination: int) -> Request:
        """As on the host."""
        return self._collectives.start_message(data, destination)

    def receive_message(self) -> tuple[int, bytes] | None:
        """As on the host."""
        return self._collectives.receive_message()

    def abort(self, code: int) -> None:
        """As on the host."""
        self._collectives.abort(code)

    @property
    def _own(self) -> slice:
        return slice(self.rank, self.rank + 1)

    def _shards(self, buffer: Tensor) -> Tensor:
        return buffer.view(self.size, buffer.numel() // self.size)

    def _cross_whole(self, buffer: Tensor, start: Start) -> Request:
        return self._cross(buffer.view(1, buffer.numel()), start, out=slice(None), back=slice(None))

    def _cross(self, rows: Tensor, start: Start, *, out: slice, back: slice) -> Request:
        """``start`` on all of ``rows``, some columns at a time; which rows go out and come back."""
        columns = max(1, self._pieces.nbytes // (len(rows) * rows.element_size()))
        chunks = rows.split(columns, dim=1)
        request = StagedRequest(self._drive, len(chunks))
        written = list(self._side.take_written(rows))
        for chunk in chunks:
            crossing = self._crossing(chunk, start, out, back, request, written)
            self._passage.submit(crossing)
        self._drive()
        return request

    def _crossing(
        self,
        chunk: Tensor,
        start: Start,
        out: slice,
        back: slice,
        request: StagedRequest,
        written: list[Event],
    ) -> Crossing:
        """``written``: what the first chunk to leave waits for, and the others behind it."""
        piece: Tensor
        host: Tensor

        def leave() -> Event | None:
            nonlocal piece, host
            taken = self._pieces.take()
            if taken is None:
                return None
            piece = taken
            while written:  # not before its turn: the chunks of others wait for less
                self._out.wait_event(written.pop())
            host = as_rows(piece, chunk.dtype, rows=len(chunk), columns=chunk.shape[1])
            self._device.copy(chunk[out], into=host[out], stream=self._out)
            event: Event = self._out.record_event()
            return event

        def land() -> None:
            self._device.copy(host[back], into=chunk[back], stream=self._back)
            event = self._back.record_event()
            self._pieces.give_back(piece, event)
            if request.landed():
                self._side.await_landing(event)

        return Crossing(leave, lambda: start(host.view(-1)), land)

    def _drive(self) -> None:
        """Raises CommError, with the device's name, if the device fails."""
        try:
            self._passage.advance()
        except CommError:
            raise
        except RuntimeError as error:
            raise CommError(
                f"{self._device.name} failed: {error}; look for its errors in nvidia-smi and dmesg "
                f"on {self.host}, and resume from the last checkpoint"
            ) from error


def _start_reduce_scatter(
    collectives: Collectives, algorithm: ReduceScatter, wire_dtype: WireDtype | None, host: Tensor
) -> Request:
    return collectives.start_reduce_scatter(host, algorithm, wire_dtype=wire_dtype)


def _start_all_gather(
    collectives: Collectives, wire_dtype: WireDtype | None, host: Tensor
) -> Request:
    return collectives.start_all_gather(host, wire_dtype=wire_dtype)
