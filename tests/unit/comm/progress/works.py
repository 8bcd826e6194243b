"""Works that a test holds up, completes or breaks, and threads that wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager

from dearmpi.comm.api.collectives import Request
from dearmpi.comm.progress.lane import Work
from dearmpi.comm.progress.progress import Progress
from dearmpi.config import ProgressMode

LIMIT_S = 90.0  # far beyond what any of this takes; reached only by a deadlock
MODES: list[ProgressMode] = ["thread", "poll"]


class Gate(Request):
    """A request that the test completes by opening it."""

    def __init__(self) -> None:
        self.open = False

    def test(self) -> bool:
        return self.open


class Broken(Request):
    """A request whose test fails."""

    def test(self) -> bool:
        raise OSError("wire cut")


@contextmanager
def limited(progress: Progress) -> Iterator[Progress]:
    """Close ``progress`` at the end, or at the limit, so that what hangs fails instead."""
    watch = threading.Timer(LIMIT_S, progress.close)
    watch.start()
    try:
        yield progress
        assert watch.is_alive(), f"this hung, and was ended after {LIMIT_S} s"
    finally:
        watch.cancel()
        watch.join()
        progress.close()


def progress_threads() -> int:
    return [thread.name for thread in threading.enumerate()].count("dearmpi-progress")


def holds(items: Sized, number: int) -> Callable[[], bool]:
    return lambda: len(items) >= number


def do_nothing() -> None:
    pass


def gated(
    label: str, gate: Request, started: list[str], finish: Callable[[], None] = do_nothing
) -> Work:
    def start() -> Request:
        started.append(label)
        return gate

    return Work(label, start, finish)


def in_thread(function: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors
