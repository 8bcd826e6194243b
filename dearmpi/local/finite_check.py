"""Finite check: which rank brings NaN into an exchange, known to all ranks when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dearmpi.comm.messages.values import HostBuffer
from dearmpi.comm.world import World
from dearmpi.errors import NonFiniteLossError

_NONE = float(2**53)  # above any rank and parameter


@dataclass(slots=True)
class _Report:
    buffer: HostBuffer
    arrived: bool = False


class FiniteCheck:
    """Travels beside an exchange, so that nothing waits for it but what waits for the exchange.

    names: of the parameters, in the same order on all ranks (collective).
    """

    def __init__(self, world: World, names: Sequence[str]) -> None:
        self._world, self._names = world, tuple(names)
        self._channel = world.open_channel("finite check", window=1)
        self._report: _Report | None = None

    def start(self, changes: Mapping[str, Tensor]) -> None:
        """Send whether this rank's ``changes``, by parameter, are finite (collective)."""
        own = _NONE
        for name, is_finite in zip(changes, _are_finite(list(changes.values())), strict=True):
            if not is_finite:
                own = float(self._world.rank * len(self._names) + self._names.index(name))
                break
        report = self._report = _Report(HostBuffer(np.array([own])))

        def finish() -> None:
            report.arrived = True

        self._channel.submit(
            "the finite check", lambda c: c.start_all_reduce(report.buffer, "min"), finish
        )

    def read(self) -> None:
        """Raise NonFiniteLossError, on all ranks alike, if one of them had NaN or infinity.

        It waits for the check that was started last. Once read, the check is over.
        """
        report, self._report = self._report, None
        if report is None:
            return
        self._world.progress.wait_until(lambda: report.arrived, what="the finite check")
        (found,) = report.buffer.array.tolist()
        if found < _NONE:
            rank, index = divmod(int(found), len(self._names))
            raise NonFiniteLossError(
                f"rank {rank} on {self._world.hosts[rank]} brought NaN or infinity in "
                f"{self._names[index]} into an exchange; go on from a checkpoint with a lower "
                "learning rate, or clip gradients",
                code="not-finite",
            )

    def close(self) -> None:
        """Give the channel back (collective)."""
        self._channel.close()


def _are_finite(tensors: Sequence[Tensor]) -> list[bool]:
    """A sum is not finite if one of its numbers is not; a device is waited for once."""
    if not tensors:
        return []
    device = tensors[0].device
    flags: list[bool] = torch.stack([one.sum().isfinite().to(device) for one in tensors]).tolist()
    return flags
