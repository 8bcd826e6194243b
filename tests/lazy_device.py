"""A device that does everything as late as it may, on host tensors.

What is queued to one of its streams happens only once somebody asks for it: an event behind it is
polled for the second time, a stream that waits for it runs, or the host computes on that stream.
Whoever forgets to wait therefore sees old values, every time. What the main thread computes happens
at once; with the gate closed its stream says that it has not happened yet, as on a device that is
behind the host, and a host that waits for it raises NotYetError.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dearmpi.device.accelerator import Device

# What torch raises for a device that fails; before it had this type, a plain RuntimeError.
AcceleratorError: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)
_LOCK = threading.RLock()


class NotYetError(Exception):
    """The host would have to wait for a device that is behind."""


class LazyStream:
    """Operations that have not happened yet."""

    def __init__(self) -> None:
        self._operations: list[Callable[[], object]] = []
        self._num_done = 0

    def queue(self, operation: Callable[[], object]) -> None:
        with _LOCK:
            self._operations.append(operation)

    def run(self, stop: int | None = None) -> None:
        """Do what comes before ``stop``; by default all."""
        with _LOCK:
            stop = len(self._operations) if stop is None else stop
            while self._num_done < stop:
                self._operations[self._num_done]()
                self._num_done += 1

    def has_done(self, stop: int) -> bool:
        with _LOCK:
            return self._num_done >= stop

    def record_event(self) -> LazyEvent:
        with _LOCK:
            return LazyEvent(self, len(self._operations))

    def wait_event(self, event: LazyEvent) -> None:
        self.queue(event.run)

    def synchronize(self) -> None:
        self.run()


class HostStream(LazyStream):
    """The stream of the main thread's computing, and every event in it."""

    is_open = True

    def queue(self, operation: Callable[[], object]) -> None:
        operation()

    def record_event(self) -> Any:
        return self

    def query(self) -> bool:
        return self.is_open

    def run(self, stop: int | None = None) -> None:
        if not self.is_open:
            raise NotYetError


class LazyEvent:
    """Over for whoever polls it twice."""

    def __init__(self, stream: LazyStream, position: int) -> None:
        self._stream, self._position = stream, position
        self._was_polled = False

    def query(self) -> bool:
        if self._was_polled:
            with contextlib.suppress(NotYetError):
                self.run()
        self._was_polled = True
        return self._stream.has_done(self._position)

    def run(self) -> None:
        self._stream.run(self._position)


class LazyDevice:
    """``Device`` whose memory is the host's.

    fails_at: the number of a copy (from 1) that fails as on a device that is gone; None for none.
    threads: those that have made it theirs. captures: whether a graph is being captured.
    """

    name = "lazy:0 (stand-in)"

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.pinned_bytes = self.num_copies = 0
        self.captures = False
        self.threads: set[int] = set()
        self._fails_at = fails_at
        self.host = HostStream()
        self._thread = threading.local()

    def new_stream(self) -> LazyStream:
        return LazyStream()

    def current_stream(self) -> LazyStream:
        stream: LazyStream = getattr(self._thread, "stream", self.host)
        return stream

    def adopt_thread(self) -> None:
        self.threads.add(threading.get_ident())

    @contextmanager
    def on(self, stream: LazyStream) -> Iterator[None]:
        before = self.current_stream()
        stream.run()
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def new_pinned(self, nbytes: int) -> Tensor:
        self.pinned_bytes += nbytes
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)

    def copy(self, source: Tensor, *, into: Tensor, stream: LazyStream) -> None:
        self.num_copies += 1
        if self.num_copies == self._fails_at:
            raise AcceleratorError("CUDA error: unspecified launch failure (injected)")
        stream.queue(lambda: into.copy_(source))

    def keep(self, tensor: Tensor, stream: LazyStream) -> None:
        """Nobody else uses memory that is referred to here."""

    def is_capturing(self) -> bool:
        return self.captures

    def synchronize(self) -> None:
        """Everything that matters is behind a stream that somebody waits for."""


def put_on(monkeypatch: Any, device: LazyDevice, *, chunk_bytes: int = 256) -> None:
    """Let all engines take ``device`` for that of their parameters, and stage in small chunks."""

    def device_of(params: Iterable[nn.Parameter]) -> Device:
        return device

    monkeypatch.setattr("dearmpi.device.route_choice.device_of", device_of)
    monkeypatch.setattr("dearmpi.device.routes.CHUNK_BYTES", chunk_bytes)
