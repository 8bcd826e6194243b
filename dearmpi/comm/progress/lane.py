"""Lane: operations in line, posted in order, so many of them in flight at most."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dearmpi.comm.api.collectives import Movement, Request
from dearmpi.errors import CommError


class Operation(Protocol):
    """What a lane posts. ``start`` and ``finish`` run on the progress thread.

    request: under way, or the last one. subject: what an observer may want to know of it.
    """

    request: Request | None

    @property
    def label(self) -> str: ...

    @property
    def subject(self) -> object: ...

    def start(self) -> Request:
        """Post the operation."""
        ...

    def finish(self) -> None:
        """The request is complete."""
        ...


@dataclass(slots=True, eq=False)
class Work:
    """An ``Operation`` made of two functions."""

    label: str
    start: Callable[[], Request]
    finish: Callable[[], None]
    request: Request | None = None
    subject: object = None


class Observer(Protocol):
    """Sees what becomes of a lane's operations, on the progress thread, such as for a trace."""

    def starting(self, operation: Operation) -> None:
        """``operation`` is about to be posted."""
        ...

    def started(self, operation: Operation) -> None:
        """``operation`` has a request."""
        ...

    def moved(self, operation: Operation) -> None:
        """A poll has found something of it, but not its end."""
        ...

    def completed(self, operation: Operation) -> None:
        """Its request is complete; ``finish`` follows."""
        ...


class Lane:
    """Works posted in order of submission, at most ``window`` of them in flight."""

    def __init__(self, name: str, window: int) -> None:
        self.name = name
        self.window = window
        self.queue: deque[Operation] = deque()
        self.in_flight: list[Operation] = []
        self.current: Operation | None = None  # being started, tested or finished
        self.observer: Observer | None = None

    @property
    def busy(self) -> bool:
        """Whether anything is posted, waits to be, or is being finished."""
        return bool(self.queue or self.in_flight or self.current)

    @property
    def has_room(self) -> bool:
        """Whether one more operation would be posted at once."""
        return len(self.queue) + len(self.in_flight) < self.window

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
            self._post(work)
            movement = Movement.OPERATION
        for work in list(self.in_flight):
            self.current = work
            assert work.request is not None
            if work.request.test():
                self.in_flight.remove(work)
                if self.observer is not None:
                    self.observer.completed(work)
                work.finish()
                movement = Movement.OPERATION
            elif (moved := work.request.movement) is not Movement.NONE:
                movement = max(movement, moved)
                if self.observer is not None:
                    self.observer.moved(work)
        self.current = None
        return movement

    def _post(self, operation: Operation) -> None:
        if self.observer is not None:
            self.observer.starting(operation)
        operation.request = operation.start()
        if self.observer is not None:
            self.observer.started(operation)
