"""A signal asks all ranks to stop at the same step, and does nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest

from dearmpi.errors import UsageError
from dearmpi.train.ranks.stop import EXIT_PREEMPTED, SIGNALS, StopRequest


class Alone:
    def all_reduce(self, values: Sequence[float], op: str = "sum") -> list[float]:
        return list(values)


class Beside:
    """A world whose other rank contributes ``value``."""

    def __init__(self, value: float) -> None:
        self.value = value

    def all_reduce(self, values: Sequence[float], op: str = "sum") -> list[float]:
        assert op == "max"
        return [max(value, self.value) for value in values]


@pytest.fixture(autouse=True)
def leave_handlers_alone() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_handlers_are_restored(number: signal.Signals) -> None:
    def untouched(*_: object) -> None:
        raise AssertionError("the handler from before must not run")

    for other in SIGNALS:
        signal.signal(other, untouched)
    with StopRequest() as stop:
        assert stop.received is None
        assert stop.agreed(Alone()) is None
        os.kill(os.getpid(), number)
        assert stop.received == number
        assert stop.agreed(Alone()) == number
    assert all(signal.getsignal(other) is untouched for other in SIGNALS)


def test_the_clock_asks_as_a_signal_does() -> None:
    stop = StopRequest()
    assert not stop.is_due
    stop.limit(1e6)
    assert not stop.is_due
    stop.limit(1e-9)
    assert stop.is_due and stop.received is None


def test_handlers_that_were_taken_over_are_taken_back() -> None:
    with StopRequest() as stop:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # as MPI may do when it begins
        stop.listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.is_due


def test_the_first_signal_counts() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == signal.SIGUSR1


def test_a_signal_of_another_rank_stops_this_one() -> None:
    with StopRequest() as stop:
        assert stop.agreed(Beside(float(signal.SIGUSR1))) == signal.SIGUSR1
        assert stop.received is None
        os.kill(os.getpid(), signal.SIGUSR1)
        # All ranks must name the same one.
        assert stop.agreed(Beside(float(signal.SIGTERM))) == signal.SIGTERM


def test_handlers_are_restored_after_an_error() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pytest.raises(RuntimeError), StopRequest():
        raise RuntimeError
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_another_thread_cannot_handle_signals() -> None:
    caught: list[UsageError] = []

    def enter() -> None:
        try:
            with StopRequest():
                pass
        except UsageError as error:
            caught.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(30)
    assert len(caught) == 1 and "main thread" in str(caught[0])


# faulthandler installs a handler written in C, as MPI libraries do.
LATE_SIGNAL = """
import faulthandler, os, signal
{install}
from dearmpi.train.ranks.stop import EXIT_PREEMPTED, StopRequest
with StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.received == signal.SIGUSR1
os.kill(os.getpid(), signal.SIGUSR1)
raise SystemExit(EXIT_PREEMPTED)
"""


@pytest.mark.parametrize("install", ["", "faulthandler.register(signal.SIGUSR1)"])
def test_a_late_signal_does_not_change_the_exit_code(install: str) -> None:
    program = LATE_SIGNAL.format(install=install)
    result = subprocess.run([sys.executable, "-c", program], timeout=180)
    assert result.returncode == EXIT_PREEMPTED == 75
