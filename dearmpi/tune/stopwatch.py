"""Stopwatches: marks in the course of computation, on the host or on a device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

Mark = Any


class Stopwatch(Protocol):
    """Takes marks while a model computes, and says later how far they lie apart."""

    def mark(self) -> Mark:
        """This point of the computation."""
        ...

    def settle(self) -> None:
        """Wait until every mark has been reached."""
        ...

    def seconds(self, start: Mark, stop: Mark) -> float:
        """From one mark to another, both settled."""
        ...


def no_wait() -> float:
    return 0.0


class HostStopwatch:
    """For models on the CPU, where a mark is reached when it is taken.

    waited: seconds so far that do not count, such as ``DistributedOptimizer.waited_s``.
    """

    def __init__(self, waited: Callable[[], float] = no_wait) -> None:
        self._waited = waited

    def mark(self) -> Mark:
        """Seconds on a clock that stands still while this process waits."""
        return time.perf_counter() - self._waited()

    def settle(self) -> None:
        """Nothing is outstanding."""

    def seconds(self, start: Mark, stop: Mark) -> float:
        return float(stop - start)


class TimingEvent(Protocol):
    """What is needed of ``torch.cuda.Event``."""

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any, /) -> float: ...


def record_event(device: torch.device) -> TimingEvent:
    """An event on the stream in use on ``device``, which need not be the thread's own device."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    recorded: TimingEvent = event
    return recorded


class DeviceStopwatch:
    """For models on a device: marks are events on the stream in use, which block nothing."""

    def __init__(self, record: Callable[[], TimingEvent]) -> None:
        """``record``: makes an event that is recorded now."""
        self._record = record
        self._last: dict[int, TimingEvent] = {}

    def mark(self) -> Mark:
        """An event in the order of the kernels."""
        event = self._record()
        self._last[threading.get_ident()] = event
        return event

    def settle(self) -> None:
        """Wait for the last event of each thread: autograd marks from threads of its own."""
        for event in self._last.values():
            event.synchronize()

    def seconds(self, start: Mark, stop: Mark) -> float:
        return float(start.elapsed_time(stop)) / 1e3


def stopwatch_for(model: torch.nn.Module, waited: Callable[[], float] = no_wait) -> Stopwatch:
    """The one for the device on which the parameters of ``model`` are."""
    devices = (param.device for param in model.parameters() if param.is_cuda)
    device = next(devices, None)
    return (
        HostStopwatch(waited) if device is None else DeviceStopwatch(partial(record_event, device))
    )
