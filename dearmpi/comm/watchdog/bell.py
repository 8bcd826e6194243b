"""Bell: wakes one thread. No thread owns it, so a signal handler may ring or wait at any time."""

from __future__ import annotations

import threading


class Bell:
    """A ring that comes before the wait ends it at once; several rings count as one.

    Not a condition: a handler that interrupts the holder of its lock would wait for ever.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake the thread that waits, or the next one that does."""
        try:
            self._lock.release()
        except RuntimeError:  # it was rung before
            return

    def wait(self, timeout_s: float | None) -> None:
        """Return after a ring, or after ``timeout_s``; None stands for ever."""
        self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s)
