"""Collectives of one rank on a device's tensors: the sum is there already; nothing is copied."""

from __future__ import annotations

from torch import Tensor

from dearmpi.comm.api.collectives import Completed, Request
from dearmpi.engine.device.device_collectives import DeviceCollectives, Start


class AloneDeviceCollectives(DeviceCollectives):
    """``DeviceCollectives`` for a single rank."""

    def _cross(self, rows: Tensor, start: Start, *, out: slice, back: slice) -> Request:
        """What is queued to the side stream from now on waits until ``rows`` are written."""
        for event in self._side.take_written(rows):
            self._side.await_landing(event)
        return Completed()
