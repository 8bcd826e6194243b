"""Device: what the engine asks of an accelerator, and CUDA's answer.

Tests answer with a fake on host tensors, which does everything as late as it may.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dearmpi.config import MIB
from dearmpi.errors import CommError, ConfigError, DeviceError


class DeviceEvent(Protocol):
    """A moment in a stream."""

    def query(self) -> bool:
        """Whether everything before it is done; does not wait."""
        ...


class Stream(Protocol):
    """Operations of a device that run in order; ``torch.cuda.Stream`` is one."""

    def record_event(self) -> Any:
        """A ``DeviceEvent`` behind what the stream has so far."""
        ...

    def wait_event(self, event: Any) -> None:
        """Let what comes later in the stream wait for ``event``; the host does not."""
        ...

    def synchronize(self) -> None:
        """Let the host wait for what the stream has so far."""
        ...


class Device(Protocol):
    """An accelerator; nothing but ``new_pinned`` and ``synchronize`` lets the host wait."""

    @property
    def name(self) -> str:
        """For people, such as ``cuda:0 (NVIDIA H200)``."""
        ...

    def new_stream(self) -> Stream: ...

    def current_stream(self) -> Stream:
        """The one on which the calling thread's operations run."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, the calling thread's operations run on ``stream``."""
        ...

    def adopt_thread(self) -> None:
        """Be the calling thread's device from now on, unless the thread is the user's."""
        ...

    def new_pinned(self, nbytes: int) -> Tensor:
        """Bytes of host memory from and to which copies run beside everything else."""
        ...

    def copy(self, source: Tensor, *, into: Tensor, stream: Any) -> None:
        """Queue a copy of ``source``, of the same shape as ``into``; one of both is pinned."""
        ...

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Do not use ``tensor``'s memory again before ``stream`` has done what it has so far."""
        ...

    def is_capturing(self) -> bool:
        """Whether the calling thread's stream is being captured into a graph."""
        ...

    def synchronize(self) -> None:
        """Let the host wait for all streams."""
        ...


class CudaDevice:
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = f"{device} ({torch.cuda.get_device_name(device)})"

    def new_stream(self) -> Stream:
        """A stream of the device."""
        stream: Stream = torch.cuda.Stream(self._device)
        return stream

    def current_stream(self) -> Stream:
        """The calling thread's."""
        stream: Stream = torch.cuda.current_stream(self._device)
        return stream

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """The device becomes the calling thread's as well."""
        self.adopt_thread()
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def new_pinned(self, nbytes: int) -> Tensor:
        """From torch's cache of pinned memory. Raises DeviceError if there is no more."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise DeviceError(
                f"{nbytes / MIB:.1f} MiB of host memory cannot be pinned for copies from and to "
                f"{self.name}: {error}; make window or bucket_cap_mb smaller, or leave out "
                "update_on 'host', which pins this rank's share of the parameters",
                code="host-memory-not-pinned",
            ) from error

    def copy(self, source: Tensor, *, into: Tensor, stream: Any) -> None:
        """By torch's own means, which take rows that are apart as well."""
        with self.on(stream):
            into.copy_(source, non_blocking=True)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Tell the allocator."""
        tensor.record_stream(stream)

    def is_capturing(self) -> bool:
        """As torch knows of its current stream."""
        return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self._device)

    def adopt_thread(self) -> None:
        """Threads begin on device 0, where every rank would keep a context; and an MPI that is
        given device memory looks for that device's context in the thread that calls it.

        The main thread is the user's.
        """
        if threading.current_thread() is not threading.main_thread():
            torch.cuda.set_device(self._device)


def device_of(params: Iterable[nn.Parameter]) -> Device | None:
    """The device that holds all of ``params``; None for the host.

    Raises ConfigError if they are on several, or on a kind that is not served.
    """
    devices = dict.fromkeys(param.device for param in params)
    first, *others = devices
    if others:
        raise ConfigError(
            f"the optimizer's parameters are on {first} and on {others[0]}; one rank trains on one "
            "device: move the model there as a whole, and give the other device a rank of its own",
            code="several-devices",
        )
    if first.type == "cpu":
        return None
    if first.type != "cuda":
        raise ConfigError(
            f"the optimizer's parameters are on {first}; cpu and cuda are served: move the model "
            "there before the optimizer is made",
            code="device-not-served",
        )
    return CudaDevice(first)


@contextmanager
def failures_of(device: Device) -> Iterator[None]:
    """Raise CommError, with the name of ``device``, for what a device that fails raises inside,
    and DeviceError if its memory is out. Other errors, such as MPI's, are none of its own.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"{device.name} is out of memory: {error}; use fewer ranks on the device, a smaller "
            "model or batch, or update_on 'host', which keeps the optimizer's state off it",
            code="device-memory-full",
        ) from error
    except RuntimeError as error:
        if not is_of_device(error):
            raise
        said = str(error).partition("\n")[0]  # what follows is advice on debugging kernels
        raise CommError(
            f"{device.name} failed: {said}; look for its errors in nvidia-smi and dmesg there, "
            "and resume from the last checkpoint",
            code="device-failed",
        ) from error


def is_of_device(error: Exception) -> bool:
    """Whether torch raises ``error`` for a device; older torch has no type of its own."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    kind = getattr(torch, "AcceleratorError", None)
    if kind is None:
        return type(error) is RuntimeError and str(error).startswith("CUDA error")
    return isinstance(error, kind)


def through_host(flat: Tensor, exchange: Callable[[Tensor], None]) -> None:
    """Have ``exchange`` change ``flat`` (1-D) by way of host memory; the host waits.

    Memory of conjugates or of negated values holds others: a copy travels for them.
    """
    host = flat.cpu().resolve_conj().resolve_neg()
    exchange(host)
    if host is not flat:
        flat.copy_(host)


def zeros(numel: int, like: Tensor) -> Tensor:
    """1-D, on the device and of the dtype of ``like``; DeviceError with sizes if it has no room."""
    try:
        return torch.zeros(numel, dtype=like.dtype, device=like.device)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(like.device)
        held = torch.cuda.memory_reserved(like.device)
        raise DeviceError(
            f"{like.device} ({torch.cuda.get_device_name(like.device)}) has no room for a flat "
            f"buffer of {numel * like.itemsize / MIB:.1f} MiB: {free / MIB:.0f} MiB are free of "
            f"{total / MIB:.0f}, and this rank holds {held / MIB:.0f}. Buckets need the size of "
            "the model's parameters once more, for gradients; use fewer ranks on the device, or a "
            "smaller model or batch",
            code="device-memory-full",
        ) from error
