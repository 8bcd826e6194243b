"""Stop request: a signal or the clock makes the run save and end at the next step.

SIGUSR1 (what SLURM sends ahead of the time limit) and SIGTERM (preemption) only set a flag: saving
inside a handler could meet a collective half done. Ranks see a signal at different times, so they
agree on it between steps. A run that stops this way exits with ``EXIT_PREEMPTED``: a batch script
that sees it puts the job back into the queue.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Literal, Protocol, Self

from dearmpi.errors import UsageError

EXIT_PREEMPTED = 75
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)

Handler = Callable[[int, FrameType | None], Any] | int | None


class ReducingWorld(Protocol):
    """What an agreement needs of the world."""

    def all_reduce(self, values: Sequence[float], /, op: Literal["max"]) -> list[float]: ...


class StopRequest:
    """Notes the signals of SIGNALS while it is entered, and restores their handlers after, except
    that SIGUSR1 is ignored where it would end the process.

    Enter it in the main thread and early, as an unhandled SIGUSR1 ends the process; ``listen``
    again once MPI has been initialised, which may install handlers of its own; leave it as late as
    possible. The clock starts when it is made.
    """

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Handler] = {}
        self._began_s = time.monotonic()
        self._limit_s: float | None = None

    @property
    def received(self) -> signal.Signals | None:
        """The first signal that this rank got, None until then."""
        return self._received

    @property
    def is_due(self) -> bool:
        """Whether this rank should stop: it got a signal, or its time is up."""
        elapsed_s = time.monotonic() - self._began_s
        return self._received is not None or (
            self._limit_s is not None and elapsed_s >= self._limit_s
        )

    def limit(self, seconds: float | None) -> None:
        """Request a stop this many seconds after the start as well; None: never."""
        self._limit_s = seconds

    def agreed(self, world: ReducingWorld) -> signal.Signals | None:
        """Return the signal that any rank got, the same on all ranks, or None.

        Collective: every rank must call it. Of several signals the highest number wins.
        """
        (number,) = world.all_reduce([float(self._received or 0)], op="max")
        return signal.Signals(int(number)) if number else None

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "signals can be handled in the main thread only; enter StopRequest there",
                code="main-thread-only",
            )
        for number in SIGNALS:
            self._previous[number] = signal.getsignal(number)
        self.listen()
        return self

    def listen(self) -> None:
        """Handle the signals from now on, also where another library has replaced the handlers."""
        for number in SIGNALS:
            signal.signal(number, self._note)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, _handler_after(number, handler))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = signal.Signals(number)


def _handler_after(number: signal.Signals, before: Handler) -> Handler:
    # A request that comes when the run has ended must not end it with another exit code. For a
    # handler that MPI installed, Python shows the default one (or None), and cannot put it back.
    if before is None or (number == signal.SIGUSR1 and before == signal.SIG_DFL):
        return signal.SIG_IGN
    return before
