"""The background thread, for computation that takes long: the progress thread goes on polling."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from dearmpi.comm.api.collectives import Request
from dearmpi.comm.progress.sleeping import Bell, yield_to_computation

Function = Callable[[], object]


class BackgroundThread:
    """Runs functions one after the other, from the first one on.

    begin: what the thread calls first.
    """

    def __init__(self) -> None:
        self.begin: Function = lambda: None
        self._queue: deque[Computation] = deque()
        self._submitted = Bell()
        self._thread: threading.Thread | None = None
        self._closing = False

    def start(self, function: Function) -> Request:
        """Run ``function``; the request is complete once it has returned, and raises its error."""
        if self._thread is None:
            name = "dearmpi-background"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        computation = Computation(function)
        self._queue.append(computation)
        self._submitted.ring()
        return computation

    def is_current(self) -> bool:
        """Whether it is the calling thread."""
        return self._thread is threading.current_thread()

    def close(self, *, patience_s: float) -> None:
        """Stop the thread, and wait ``patience_s`` for its end. Drops what waits for it."""
        self._closing = True
        self._submitted.ring()
        if self._thread is not None and not self.is_current():
            self._thread.join(timeout=patience_s)

    def _run(self) -> None:
        yield_to_computation()
        is_ready = False
        while not self._closing:
            if not self._queue:
                self._submitted.wait(None)
                continue
            computation = self._queue.popleft()
            try:
                if not is_ready:
                    self.begin()
                    is_ready = True
                computation.function()
            except BaseException as error:  # for the thread that tests it; this one goes on
                computation.error = error
            computation.is_over = True
            del computation  # which would keep its buffers until the next one comes


class Computation(Request):
    """A function on its way through the background thread."""

    def __init__(self, function: Function) -> None:
        self.function, self.is_over = function, False
        self.error: BaseException | None = None

    def test(self) -> bool:
        if self.is_over and self.error is not None:
            raise self.error
        return self.is_over
