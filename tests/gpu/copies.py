"""Part: the rate of staging, beside that of plain copies from and to pinned memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from dearmpi.comm.backends.alone import AloneCollectives
from dearmpi.config import MIB
from dearmpi.device.accelerator import CudaDevice, Device
from dearmpi.device.comm_stream import DeviceCommStream
from dearmpi.device.routes import StagedCollectives
from tests.gpu.machine import IS_DRY, device, say, settle
from tests.lazy_device import LazyDevice

NBYTES = (1 if IS_DRY else 512) * MIB
NUM_TRIALS = 5
WANTED = 0.9


def best_of(run: Callable[[], None]) -> float:
    """Seconds of the fastest trial, behind one that does not count."""
    times = []
    for _ in range(NUM_TRIALS + 1):
        settle()
        start = time.perf_counter()
        run()
        settle()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def time_plain(owner: Device, buffer: torch.Tensor) -> float:
    """Seconds for all of it out and, beside that, in again."""
    out, back = owner.new_stream(), owner.new_stream()
    pinned = [owner.new_pinned(NBYTES).view(torch.float32) for _ in range(2)]
    landing = torch.empty_like(buffer)

    def run() -> None:
        owner.copy(buffer, into=pinned[0], stream=out)
        owner.copy(pinned[1], into=landing, stream=back)

    return best_of(run)


def time_staged(owner: Device, buffer: torch.Tensor) -> float:
    """Seconds for all of it out and in again, chunk by chunk; the network takes no time."""
    carry = partial(StagedCollectives, window=2, most_bytes=NBYTES)
    side = DeviceCommStream(owner, carry)
    collectives = side.wrap_for_device(AloneCollectives())

    def run() -> None:
        request = collectives.start_all_reduce(buffer, "sum")
        while not request.test():
            pass

    return best_of(run)


def main() -> None:
    owner: Device = LazyDevice() if IS_DRY else CudaDevice(device())
    buffer = torch.zeros(NBYTES // 4, device=device())
    times = time_plain(owner, buffer), time_staged(owner, buffer)
    rates = [NBYTES / seconds / 1e9 for seconds in times]
    share = rates[1] / rates[0]
    say(
        None,
        "staging, each way",
        "1 rank",
        f"{rates[1]:.1f} GB/s, plain pinned copies {rates[0]:.1f} GB/s: {share:.0%}"
        + ("" if share >= WANTED or IS_DRY else f", BELOW {WANTED:.0%}"),
    )


main()
