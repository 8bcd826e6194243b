"""Staging: collectives on a device's tensors by way of pinned host memory.

A buffer goes in chunks: out on one stream, over MPI, and back on another, so that the copies of one
chunk run beside the network's work on the next. The host waits for none of it.
"""

from __future__ import annotations

from torch import Tensor

from dearmpi.comm.api.collectives import Collectives, Request
from dearmpi.config import MIB
from dearmpi.engine.device.device import Event
from dearmpi.engine.device.device_collectives import CrossingRequest, DeviceCollectives, Start
from dearmpi.engine.device.passage import Crossing
from dearmpi.engine.device.pinned import PinnedPieces, as_rows
from dearmpi.engine.device.side_stream import DeviceSideStream

CHUNK_BYTES = 8 * MIB
NUM_AHEAD = 2  # pieces beyond the window: one on its way out, one on its way in
_WIDEST = 16  # bytes of an element


class StagedCollectives(DeviceCollectives):
    """Pinned memory is of ``window`` and ``NUM_AHEAD`` pieces, whatever the buffers are."""

    def __init__(
        self, collectives: Collectives, side: DeviceSideStream, *, window: int, most_bytes: int
    ) -> None:
        """``most_bytes``: of the largest buffer."""
        super().__init__(collectives, side, window=window)
        self._out, self._back = self._device.new_stream(), self._device.new_stream()
        nbytes = max(min(CHUNK_BYTES, most_bytes), self.size * _WIDEST)
        self._pieces = PinnedPieces(self._device, num=window + NUM_AHEAD, nbytes=nbytes)

    def _cross(self, rows: Tensor, start: Start, *, out: slice, back: slice) -> Request:
        """Some columns at a time."""
        columns = max(1, self._pieces.nbytes // (len(rows) * rows.element_size()))
        chunks = rows.split(columns, dim=1)
        request = CrossingRequest(self._drive_for, len(chunks))
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
        request: CrossingRequest,
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

        return Crossing(leave, lambda: request.post(lambda: start(host.view(-1))), land)
