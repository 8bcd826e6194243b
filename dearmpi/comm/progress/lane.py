"""Lane: operations in line, posted in order, so many of them in flight at most."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dearmpi.comm.api.collectives import Movement, Request
from dearmpi.errors import CommError


@dataclass(slots=True, eq=False)
class Work:
    """One operation: ``start`` posts it, ``finish`` runs once it is complete.

    Both run on the thread that drives progress.
    """

    label: str
    start: Callable[[], Request]
    finish: Callable[[], None]
    request: Request | None = None


class Lane:
    """Works posted in order of submission, at most ``window`` of them in flight."""

    def __init__(self, name: str, window: int) -> None:
        self.name = name
        self.window = window
        self.queue: deque[Work] = deque()
        self.in_flight: list[Work] = []
        self.current: Work | None = None  # being started, tested or finished

    @property
    def busy(self) -> bool:
        """Whether anything is posted, waits to be, or is being finished."""
        return bool(self.queue or self.in_flight or self.current)

    def advance(self) -> Movement:
        """Post what the window admits and finish what is complete."""
        if self.current is not None:  # by a KeyboardInterrupt, where the main thread drives
            posted = self.current.request is not None
            raise CommError(
                "it was interrupted while it was being "
                + ("carried out" if posted else "posted")
                + ", and cannot continue; with progress='thread' an interrupt does not reach it",
                code="communication-interrupted",
            )
        movement = Movement.NONE
        while self.queue and len(self.in_flight) < self.window:
            work = self.current = self.queue[0]  # before it leaves the queue: always busy
            self.queue.popleft()
            self.in_flight.append(work)
            work.request = work.start()
            movement = Movement.OPERATION
        for work in list(self.in_flight):
            self.current = work
            assert work.request is not None
            if work.request.test():
                self.in_flight.remove(work)
                work.finish()
                movement = Movement.OPERATION
            else:
                movement = max(movement, work.request.movement)
        self.current = None
        return movement
