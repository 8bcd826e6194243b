"""How long do the progress thread and the main thread take to notice something?

Usage: python benchmarks/wake_ups.py [COUNT]

Prints medians and the ninth tenth, in microseconds, of how much longer the progress thread sleeps
than it asks to; of the time from handing an operation over to its start, while that thread has
nothing to do, polls for an operation that began 1 or 20 ms ago, or waits for the interpreter while
the main thread runs Python; and from the end of an operation to the return of a wait for it. All
with the timer slack that Linux gives to each thread (50 us) and with 1 us. No MPI is needed.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence

from dearmpi.comm.api.collectives import Completed, Request
from dearmpi.comm.progress.lane import Lane, Work
from dearmpi.comm.progress.progress import Progress

_PR_SET_TIMERSLACK = 29
_SLEEPS_S = (20e-6, 100e-6, 1e-3)


class Pending(Request):
    """A request that is complete from ``until_s`` on."""

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s

    def test(self) -> bool:
        """Whether it is."""
        return time.perf_counter() >= self._until_s


class Driver:
    """A progress thread of its own, whose sleeps the system may extend by ``slack_ns``."""

    def __init__(self, slack_ns: int) -> None:
        self._progress = Progress("thread", origin="this process")
        self._lane: Lane = self._progress.open_lane("trial", window=4)
        libc = ctypes.CDLL(None, use_errno=True)
        self.do(lambda: libc.prctl(_PR_SET_TIMERSLACK, slack_ns, 0, 0, 0))

    def do(self, action: Callable[[], object]) -> None:
        """Have the thread carry out ``action``."""
        done: list[object] = []

        def start() -> Completed:
            done.append(action())
            return Completed()

        self._progress.submit(self._lane, Work("action", start, lambda: None))
        self._progress.wait_until(lambda: bool(done), what="an action")

    def overshoot_s(self, sleep_s: float) -> float:
        """How much longer than ``sleep_s`` the thread sleeps."""
        took: list[float] = []

        def sleep() -> None:
            start_s = time.perf_counter()
            time.sleep(sleep_s)
            took.append(time.perf_counter() - start_s)

        self.do(sleep)
        return took[0] - sleep_s

    def start_delay_s(self, busy_s: float = 0.0, *, computes: bool = False) -> float:
        """From handing over to start; ``busy_s`` after another operation began, if above 0."""
        if busy_s:
            request = Pending(time.perf_counter() + 2 * busy_s)
            self._progress.submit(self._lane, Work("other", lambda: request, lambda: None))
        time.sleep(busy_s or 2e-3)
        started: list[float] = []

        def start() -> Completed:
            started.append(time.perf_counter())
            return Completed()

        begin_s = time.perf_counter()
        self._progress.submit(self._lane, Work("operation", start, lambda: None))
        while computes and not started:
            pass
        self._progress.wait_until(lambda: not self._lane.busy, what="the lane to empty")
        return started[0] - begin_s

    def return_delay_s(self) -> float:
        """From the end of an operation of 5 ms to the return of the wait for it."""
        ended: list[float] = []
        request = Pending(time.perf_counter() + 5e-3)
        work = Work("operation", lambda: request, lambda: ended.append(time.perf_counter()))
        self._progress.submit(self._lane, work)
        self._progress.wait_until(lambda: bool(ended), what="the operation")
        return time.perf_counter() - ended[0]

    def close(self) -> None:
        """End the thread."""
        self._progress.close()


def main() -> None:
    count = int([*sys.argv[1:], "200"][0])
    for slack_ns in (50_000, 1_000):
        driver = Driver(slack_ns)
        print(f"timer slack {slack_ns / 1e3:g} us")
        for sleep_s in _SLEEPS_S:
            show(
                f"sleep of {sleep_s * 1e6:g} us",
                [driver.overshoot_s(sleep_s) for _ in range(count)],
            )
        show("start, idle", [driver.start_delay_s() for _ in range(count)])
        for busy_s in (1e-3, 20e-3):
            delays = [driver.start_delay_s(busy_s) for _ in range(count)]
            show(f"start, polling for {busy_s * 1e3:g} ms", delays)
        show("start, beside Python", [driver.start_delay_s(computes=True) for _ in range(count)])
        show("return of a wait", [driver.return_delay_s() for _ in range(count)])
        driver.close()


def show(what: str, seconds: Sequence[float]) -> None:
    """A line with median and ninth tenth."""
    ordered = sorted(seconds)
    middle, late = (ordered[int(share * len(ordered))] * 1e6 for share in (0.5, 0.9))
    print(f"  {what:24s} {middle:7.0f} {late:7.0f}")


if __name__ == "__main__":
    main()
