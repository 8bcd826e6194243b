"""One rank's collectives for a device, for tests that poll them by hand."""

from __future__ import annotations

from torch import Tensor

from dearmpi.device.comm_stream import DeviceCommStream
from dearmpi.device.device_collectives import DeviceCollectives
from dearmpi.device.routes import DirectCollectives, StagedCollectives
from tests.fakes import FakeCollectives, FakeHub
from tests.lazy_device import LazyDevice

SIZE = 2
WINDOW = 2


class Rank:
    """One rank's collectives for a device, on a channel of ``hub`` and polled by the test."""

    def __init__(self, hub: FakeHub, rank: int, *, direct: bool = False) -> None:
        collectives, request = FakeCollectives(hub, rank).start_duplicate()
        request.test()
        self.device = LazyDevice()
        self.comm_stream = DeviceCommStream(self.device, wrap=None)
        self.collectives: DeviceCollectives
        if direct:
            self.collectives = DirectCollectives(collectives, self.comm_stream, window=WINDOW)
        else:
            self.collectives = StagedCollectives(
                collectives, self.comm_stream, window=WINDOW, most_bytes=1 << 20
            )

    def values(self, buffer: Tensor) -> list[float]:
        """What the device's work sees after all that it was told to wait for."""
        with self.comm_stream.running():
            return [float(value) for value in buffer]
