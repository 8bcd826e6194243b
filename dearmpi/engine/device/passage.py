"""Passage: operations on a device's memory, over the network in the order in which they were asked.

Each rank's device is ready at another time, but collectives of one communicator must start in one
order everywhere. So whatever leaves the device queues here, and starts when its turn has come and
the device is done with its memory. Driven by polling, as MPI is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dearmpi.comm.api.collectives import Movement, Request
from dearmpi.engine.device.device import Event


@dataclass(slots=True, eq=False)
class Crossing:
    """An operation, or a part of one.

    leave: queues what the device has to do first; the event behind it, or None while there is no
        memory for it. start: posts the operation. land: queues what the device does with the
        result; called when the operation is complete.
    """

    leave: Callable[[], Event | None]
    start: Callable[[], Request]
    land: Callable[[], object]


class Passage:
    """Crossings in order of submission, at most ``window`` of them on the network at once."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._waiting: deque[Crossing] = deque()
        self._leaving: deque[tuple[Crossing, Event]] = deque()
        self._afloat: list[tuple[Crossing, Request]] = []

    def submit(self, crossing: Crossing) -> None:
        """Queue ``crossing`` behind what there is."""
        self._waiting.append(crossing)

    def advance(self) -> Movement:
        """Do whatever can be done now; an operation is what left, started or landed."""
        movement = Movement.NONE
        for crossing, request in list(self._afloat):
            if request.test():
                self._afloat.remove((crossing, request))
                crossing.land()
                movement = Movement.OPERATION
            else:
                movement = max(movement, request.movement)
        while self._waiting and (event := self._waiting[0].leave()) is not None:
            self._leaving.append((self._waiting.popleft(), event))
            movement = Movement.OPERATION
        while self._leaving and len(self._afloat) < self._window and self._leaving[0][1].query():
            crossing, _ = self._leaving.popleft()
            self._afloat.append((crossing, crossing.start()))
            movement = Movement.OPERATION
        return movement
