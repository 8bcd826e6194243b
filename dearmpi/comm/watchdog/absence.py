"""Absence: in ``poll`` mode, the main thread is elsewhere while operations are in flight.

Nothing then answers other ranks, so this rank itself prints where its main thread is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dearmpi.comm.api import safe_output
from dearmpi.comm.api.call import stack_of

_LOOKS = 4  # in the time after which an absence is reported
_MOST_BETWEEN_S = 5.0
CURE = (
    "call world.barrier() in place of an MPI barrier, call optimizer.synchronize() on every rank "
    "before an MPI call of the script's own that waits for other ranks, or use progress='thread'"
)


class Absence:
    """Reports once that the main thread has been away for ``warning_s``.

    Makes no MPI call, so that it may have a thread of its own under any library.
    """

    def __init__(
        self,
        *,
        origin: str,
        warning_s: float,
        driven_at: Callable[[], float],
        under_way: Callable[[], list[str]],
    ) -> None:
        """``driven_at``: when the calling thread last polled, by ``time.monotonic``. ``under_way``:
        labels of the operations that other ranks may wait for.
        """
        self._origin, self._warning_s = origin, warning_s
        self._driven_at, self._under_way = driven_at, under_way
        self._main = threading.get_ident()
        self._seen_at = self._reported_at = float("-inf")  # driven_at() at the last look and report
        self._end, self._is_over = threading.Event(), False

    def start(self) -> None:
        """Check from now on, in a thread that ends with ``close`` or the process."""
        threading.Thread(target=self._run, name="dearmpi-absence", daemon=True).start()

    def close(self) -> None:
        if not self._is_over:  # a signal handler that interrupts set() must not wait for its lock
            self._is_over = True
            self._end.set()

    def look(self) -> None:
        """Print the report if one is due."""
        driven_at, seen_at = self._driven_at(), self._seen_at
        self._seen_at = driven_at
        away_s = time.monotonic() - driven_at
        # Two checks must agree: a suspended process first gets its turn to go on.
        if away_s < self._warning_s or driven_at != seen_at or driven_at == self._reported_at:
            return
        if operations := self._under_way():
            self._reported_at = driven_at
            safe_output.write(self._report(away_s, operations))

    def _report(self, away_s: float, operations: list[str]) -> str:
        lines = [
            f"[{self._origin}] has not polled for {away_s:.0f} s, and other ranks may wait for its "
            f"{', '.join(operations)}. With progress='poll' only calls of the model, the optimizer "
            "and the world complete operations; the main thread is elsewhere:",
            *(f"      {line}" for line in stack_of(self._main)),
            f"If it waits there for other ranks, this may never end: {CURE}",
        ]
        return "\n".join(lines)

    def _run(self) -> None:
        while not self._is_over:
            self._end.wait(min(self._warning_s / _LOOKS, _MOST_BETWEEN_S))
            self.look()
