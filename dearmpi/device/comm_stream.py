"""Where the progress thread computes: on a stream of its own, and on how many cores.

On a device the host only queues. What is "done" to the pipeline is queued to the device, and a
``CommStream`` makes streams wait for each other; the host waits for none. On the host an operation
is over when it returns, and a ``HostCommStream`` does nothing.

On the host the progress thread adds and updates on one core, and leaves the others to the model.
With torch's threads for each sum, a rank would have two teams of them on the same cores. One of the
two waits for its next sum by spinning (figures in docs/contributing/log.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from dearmpi.comm.world import World
from dearmpi.device.accelerator import Device, DeviceEvent, Stream, failures_of
from dearmpi.torch_internals import has_unusual_modes, without_modes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dearmpi.comm.api.collectives import Collectives


_NOTHING = nullcontext()


class CommStream(Protocol):
    """What the engine asks; *current* is the stream of the calling thread.

    name: how tensors get to MPI, and why, for people.
    num_ahead: operations of a channel that may be between here and the network, beside those on it.
    """

    @property
    def name(self) -> str: ...

    @property
    def num_ahead(self) -> int: ...

    def running(self) -> AbstractContextManager[Any]:
        """Inside, the calling thread's operations run here."""
        ...

    def section(self) -> AbstractContextManager[Any]:
        """The same, after everything on the current stream, which then waits for it."""
        ...

    def current(self) -> Stream | None:
        """The current stream."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, the calling thread's operations run on ``stream``, which was current once."""
        ...

    def wait_for_current(self) -> None:
        """Let what is queued here from now on wait for the current stream as it is now."""
        ...

    def make_current_wait(self) -> None:
        """Let the current stream wait for all that is queued here."""
        ...

    def mark(self) -> DeviceEvent | None:
        """The moment behind all that is queued here."""
        ...

    def await_mark(self, mark: DeviceEvent) -> bool:
        """Let the current stream wait for ``mark``; True if it has passed already."""
        ...

    def written(self, buffer: Tensor, streams: Iterable[Any]) -> None:
        """``buffer`` is written on ``streams``, and may be sent after that.

        What is sent without such a note is taken to be written here.
        """
        ...

    def keep(self, tensor: Tensor) -> None:
        """``tensor`` is used here, though another stream's allocator made it."""
        ...

    def wrap_for_device(self, collectives: Collectives) -> Collectives:
        """``collectives`` that take this device's tensors."""
        ...

    def finish(self) -> None:
        """Let the host wait until nothing of this device is under way."""
        ...


class HostCommStream:
    """For tensors on the host."""

    name = "on the host"
    num_ahead = 0

    def running(self) -> AbstractContextManager[Any]:
        """Nothing to change."""
        return _NOTHING

    def section(self) -> AbstractContextManager[Any]:
        """Nothing to change."""
        return _NOTHING

    def current(self) -> None:
        """There are no streams."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Nothing to change."""
        return _NOTHING

    def wait_for_current(self) -> None:
        """Everything is over."""

    def make_current_wait(self) -> None:
        """Everything is over."""

    def mark(self) -> None:
        """Everything is over."""

    def await_mark(self, mark: DeviceEvent) -> bool:
        """There is nothing to wait for."""
        return True

    def written(self, buffer: Tensor, streams: Iterable[Any]) -> None:
        """Everything is over."""

    def keep(self, tensor: Tensor) -> None:
        """Memory belongs to nobody else."""

    def wrap_for_device(self, collectives: Collectives) -> Collectives:
        """MPI works on host memory."""
        return collectives

    def finish(self) -> None:
        """Everything is over."""


class DeviceCommStream:
    """For tensors on a device."""

    def __init__(self, device: Device, wrap: Any, *, name: str = "", num_ahead: int = 0) -> None:
        """``wrap(collectives, comm_stream)`` makes collectives for this device's tensors."""
        self.device, self.name, self.num_ahead = device, name, num_ahead
        self._stream = device.new_stream()
        self._wrap = wrap
        self._written: dict[int, tuple[DeviceEvent, ...]] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """This stream as the calling thread's. Raises CommError if the device has failed, and
        DeviceError if its memory is out.
        """
        with failures_of(self.device), self.device.on(self._stream):
            yield

    @contextmanager
    def section(self) -> Iterator[None]:
        """For what both sides look at, such as the optimizer's state."""
        self.wait_for_current()
        with self.running():
            yield
        self.make_current_wait()

    def current(self) -> Stream:
        """The current stream."""
        return self.device.current_stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Of the device."""
        return self.device.on(stream)

    def wait_for_current(self) -> None:
        """By an event, which the host does not wait for."""
        self._stream.wait_event(self.current().record_event())

    def make_current_wait(self) -> None:
        """By an event, which the host does not wait for."""
        self.current().wait_event(self.mark())

    def mark(self) -> DeviceEvent:
        """An event of this stream."""
        event: DeviceEvent = self._stream.record_event()
        return event

    def await_mark(self, mark: DeviceEvent) -> bool:
        """The reader's stream waits, and no other; one that is captured into a
        graph cannot ask, and must have been synchronized before.
        """
        if self.device.is_capturing():
            return False
        if mark.query():
            return True
        self.current().wait_event(mark)
        return False

    def written(self, buffer: Tensor, streams: Iterable[Any]) -> None:
        """Note an event of each stream."""
        self._written[buffer.data_ptr()] = tuple(stream.record_event() for stream in streams)

    def take_written(self, buffer: Tensor) -> tuple[DeviceEvent, ...]:
        """The events after which ``buffer`` may be sent."""
        return self._written.pop(buffer.data_ptr(), None) or (self.mark(),)

    def await_landing(self, event: DeviceEvent) -> None:
        """Let what is queued here from now on wait for ``event``."""
        self._stream.wait_event(event)

    def copy(self, source: Tensor, *, into: Tensor) -> None:
        """Queue a copy here; one of both is pinned."""
        self.device.copy(source, into=into, stream=self._stream)

    def keep(self, tensor: Tensor) -> None:
        """Have the allocator wait for this stream."""
        self.device.keep(tensor, self._stream)

    def wrap_for_device(self, collectives: Collectives) -> Collectives:
        """As it was made to."""
        wrapped: Collectives = self._wrap(collectives, self)
        return wrapped

    def finish(self) -> None:
        """Before memory is given up or another's is looked at."""
        self.device.synchronize()


def compute_on_one_core(world: World) -> None:
    """Have the progress thread of ``world``, and the background thread, compute each by itself; all
    other threads keep their teams.

    Where waiting threads make progress (poll mode), they compute in plain modes meanwhile.
    """
    _compute_on(1, world)


def compute_on_all_cores(world: World) -> None:
    """Have the progress thread compute with as many threads as the calling one: for updates on the
    host while the model computes on a device.
    """
    _compute_on(torch.get_num_threads(), world)


def _compute_on(num_threads: int, world: World) -> None:
    if world.progress.mode != "thread":
        world.progress.around = _in_plain_modes
        return

    def choose() -> None:
        torch.get_num_threads()  # else the thread's first sum would take the last number given
        torch.set_num_threads(num_threads)

    def choose_in_background() -> None:
        choose()
        restoring = Thread(target=torch.set_num_threads, args=(count,))  # as below
        restoring.start()
        restoring.join()

    count = torch.get_num_threads()
    world.progress.background.begin = choose_in_background
    world.on_progress_thread(choose)
    torch.set_num_threads(count)  # torch hands the last number given to every thread to come


def _in_plain_modes() -> AbstractContextManager[object]:
    """Updates made in inference mode would be useless outside of it, and those made under autocast
    would be rounded.
    """
    return without_modes() if has_unusual_modes() else _NOTHING
