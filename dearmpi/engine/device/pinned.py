"""Pinned: the host memory through which a device's tensors go, a fixed number of pieces of it."""

from __future__ import annotations

import torch
from torch import Tensor

from dearmpi.engine.device.device import Device, Event


class PinnedPieces:
    """Pieces of equal size. One that was copied from is free once the device has read it."""

    def __init__(self, device: Device, *, num: int, nbytes: int) -> None:
        """Raises DeviceError if the memory cannot be had."""
        self._free: list[tuple[Tensor, Event | None]] = [
            (device.new_pinned(nbytes), None) for _ in range(num)
        ]
        self.nbytes = nbytes

    def take(self) -> Tensor | None:
        """A piece that nobody uses; None if there is none at the moment."""
        for place, (piece, event) in enumerate(self._free):
            if event is None or event.query():
                del self._free[place]
                return piece
        return None

    def give_back(self, piece: Tensor, event: Event | None = None) -> None:
        """``piece`` is free after ``event``, or at once."""
        self._free.append((piece, event))


def as_rows(piece: Tensor, dtype: torch.dtype, *, rows: int, columns: int) -> Tensor:
    """The first bytes of ``piece`` as a matrix."""
    return piece[: rows * columns * dtype.itemsize].view(dtype).view(rows, columns)
