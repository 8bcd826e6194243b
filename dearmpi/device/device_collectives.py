"""Collectives on a device's tensors, whichever route they take to MPI.

Each rank's device is ready at another time, but collectives of one communicator must start in one
order everywhere. So all that leaves the device queues in a ``TransferQueue``. A transfer starts
when its turn has come and the device is done with its memory. Driven by polling, as MPI is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dearmpi.comm.api.collectives import Collectives, Movement, ReduceOp, Request
from dearmpi.config import ReduceScatter, WireDtype
from dearmpi.cuts import Cuts, even_cuts
from dearmpi.device.accelerator import DeviceEvent, failures_of
from dearmpi.device.comm_stream import DeviceCommStream
from dearmpi.grid import Grid

Start = Callable[[Any], Request]
StartCut = Callable[[Any, Cuts], Request]
StartShards = Callable[[Any, Cuts | None], Request]
_ALL = slice(None)


class TransferRequest(Request):
    """An operation in one transfer or several; complete once the last of them is over."""

    def __init__(self, drive: Callable[[TransferRequest], Movement], num_left: int) -> None:
        self._drive = drive
        self._movement = Movement.NONE
        self._num_left = num_left
        self._is_posted = False
        self._calls: list[Callable[[], None]] = []

    def test(self) -> bool:
        """Drive all operations of the same collectives, if it is this one's turn."""
        self._movement = Movement.NONE if self.is_over else self._drive(self)
        return self.is_over

    @property
    def movement(self) -> Movement:
        """Of all that are driven."""
        return self._movement

    @property
    def is_over(self) -> bool:
        """Whether all transfers are."""
        return not self._num_left

    def when_posted(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once a part of it is posted; at once if one has been."""
        if self._is_posted:
            call()
        else:
            self._calls.append(call)

    def post(self, start: Callable[[], Request]) -> Request:
        """``start`` a part, on the network."""
        self._is_posted = True
        while self._calls:
            self._calls.pop(0)()
        return start()

    def landed(self) -> bool:
        """Count a transfer that is over; True if it was the last."""
        self._num_left -= 1
        return self.is_over


class DeviceCollectives(ABC):
    """``Collectives`` for tensors of the device of ``comm_stream``, over those of the host.

    Results are ready for what is queued to ``comm_stream`` once a request is complete. What differs
    between the ways is ``_cross``.
    """

    def __init__(
        self, collectives: Collectives, comm_stream: DeviceCommStream, *, window: int
    ) -> None:
        """``window``: most operations on the network at once."""
        self._collectives = collectives
        self.rank, self.size, self.hosts = collectives.rank, collectives.size, collectives.hosts
        self._comm_stream, self._device = comm_stream, comm_stream.device
        self._queue = TransferQueue(window)
        self._driver: TransferRequest | None = None

    def start_reduce_scatter(
        self,
        buffer: Tensor,
        algorithm: ReduceScatter | Grid,
        *,
        wire_dtype: WireDtype | None = None,
        cuts: Cuts | None = None,
    ) -> Request:
        """All shards go out, the own one comes back."""

        def start(sent: Any, parts: Cuts | None) -> Request:
            return self._collectives.start_reduce_scatter(
                sent, algorithm, wire_dtype=wire_dtype, cuts=parts
            )

        return self._begin_shards(buffer, cuts, start, out=_ALL, back=self._own)

    def start_all_gather(
        self,
        buffer: Tensor,
        algorithm: ReduceScatter | Grid = "native",
        *,
        wire_dtype: WireDtype | None = None,
        cuts: Cuts | None = None,
    ) -> Request:
        """The own shard goes out, all come back."""

        def start(sent: Any, parts: Cuts | None) -> Request:
            return self._collectives.start_all_gather(
                sent, algorithm, wire_dtype=wire_dtype, cuts=parts
            )

        return self._begin_shards(buffer, cuts, start, out=self._own, back=_ALL)

    def start_all_reduce(self, buffer: Tensor, op: ReduceOp) -> Request:
        """Everything goes both ways."""
        return self._begin(
            buffer.view(1, buffer.numel()),
            lambda sent: self._collectives.start_all_reduce(sent, op),
            out=_ALL,
            back=_ALL,
        )

    def start_broadcast(self, buffer: Tensor, root: int) -> Request:
        """Everything goes both ways."""
        return self._begin(
            buffer.view(1, buffer.numel()),
            lambda sent: self._collectives.start_broadcast(sent, root),
            out=_ALL,
            back=_ALL,
        )

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

    def _begin(self, rows: Tensor, start: Start, *, out: slice, back: slice) -> Request:
        """``_cross``. Raises CommError, with the device's name, if the device fails."""
        self._device.adopt_thread()
        with failures_of(self._device):
            return self._cross(rows, start, out=out, back=back)

    def _begin_shards(
        self, buffer: Tensor, cuts: Cuts | None, start: StartShards, *, out: slice, back: slice
    ) -> Request:
        """``start`` on the shards of ``buffer``, with None for the cuts of equal ones.

        Raises CommError, with the device's name, if the device fails.
        """
        if cuts is None or cuts.is_even:
            rows = buffer.view(self.size, even_cuts(buffer.numel(), self.size).largest)
            return self._begin(rows, lambda sent: start(sent, None), out=out, back=back)
        self._device.adopt_thread()
        with failures_of(self._device):
            return self._cross_cut(buffer, cuts, start, out=out, back=back)

    @abstractmethod
    def _cross_cut(
        self, buffer: Tensor, cuts: Cuts, start: StartCut, *, out: slice, back: slice
    ) -> Request:
        """As ``_cross``, of the shards of ``buffer`` by ``cuts``."""

    @abstractmethod
    def _cross(self, rows: Tensor, start: Start, *, out: slice, back: slice) -> Request:
        """``start`` on the memory of ``rows``, of which some go out, and some come back."""

    @property
    def _own(self) -> slice:
        return slice(self.rank, self.rank + 1)

    def _drive_for(self, request: TransferRequest) -> Movement:
        """``_drive``, once in a poll of them all: one request does it until it is over."""
        if self._driver is None or self._driver.is_over:
            self._driver = request
        return self._drive() if self._driver is request else Movement.NONE

    def _drive(self) -> Movement:
        """What moved. Raises CommError, with the device's name, if the device fails."""
        self._device.adopt_thread()
        with failures_of(self._device):
            return self._queue.advance()


@dataclass(slots=True, eq=False)
class DeviceTransfer:
    """An operation, or a part of one.

    leave: queues what the device has to do first; the event behind it, or None while there is no
        memory for it. start: posts the operation. land: queues what the device does with the
        result; called when the operation is complete.
    """

    leave: Callable[[], DeviceEvent | None]
    start: Callable[[], Request]
    land: Callable[[], object]


class TransferQueue:
    """Transfers in order of submission, at most ``window`` of them on the network at once."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._waiting: deque[DeviceTransfer] = deque()
        self._leaving: deque[tuple[DeviceTransfer, DeviceEvent]] = deque()
        self._in_flight: list[tuple[DeviceTransfer, Request]] = []

    def submit(self, transfer: DeviceTransfer) -> None:
        """Queue ``transfer`` behind what there is."""
        self._waiting.append(transfer)

    def advance(self) -> Movement:
        """Do whatever can be done now; an operation is what left, started or landed."""
        movement = Movement.NONE
        for transfer, request in list(self._in_flight):
            if request.test():
                self._in_flight.remove((transfer, request))
                transfer.land()
                movement = Movement.OPERATION
            else:
                movement = max(movement, request.movement)
        while self._waiting and (event := self._waiting[0].leave()) is not None:
            self._leaving.append((self._waiting.popleft(), event))
            movement = Movement.OPERATION
        while self._leaving and len(self._in_flight) < self._window and self._leaving[0][1].query():
            transfer, _ = self._leaving.popleft()
            self._in_flight.append((transfer, transfer.start()))
            movement = Movement.OPERATION
        return movement
