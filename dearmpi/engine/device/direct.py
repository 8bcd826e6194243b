"""Direct: collectives on a device's tensors by an MPI that takes device memory.

MPI knows nothing of streams. It gets memory only after the events behind which it is written have
passed, and what collectives compute themselves, such as the sums of a ring, is over when it
returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from dearmpi.comm.api.collectives import Collectives, Request
from dearmpi.engine.device.device import Device, Event, Stream
from dearmpi.engine.device.device_collectives import CrossingRequest, DeviceCollectives, Start
from dearmpi.engine.device.passage import Crossing
from dearmpi.engine.device.side_stream import DeviceSideStream


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
class AllOf:
    """The moment when all of several have passed."""

    events: tuple[Event, ...]

    def query(self) -> bool:
        """Whether all have."""
        return all(event.query() for event in self.events)


class DirectCollectives(DeviceCollectives):
    """No copies: whole buffers, in the order in which they were asked for."""

    def __init__(self, collectives: Collectives, side: DeviceSideStream, *, window: int) -> None:
        super().__init__(collectives, side, window=window)
        self._stream = self._device.new_stream()

    def _cross(self, rows: Tensor, start: Start, *, out: slice, back: slice) -> Request:
        """What goes out and what comes back is MPI's affair."""
        request = CrossingRequest(self._drive_for, 1)
        written = AllOf(self._side.take_written(rows))
        buffer = SettledBuffer(rows.view(-1), self._device, self._stream)
        post = partial(request.post, partial(start, buffer))
        self._passage.submit(Crossing(lambda: written, post, request.landed))
        self._drive()
        return request
