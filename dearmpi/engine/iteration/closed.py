"""What is left of an engine once it is closed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.engine.iteration.alone import AloneEngine
from dearmpi.engine.trace.clock import IterationTimes
from dearmpi.engine.trace.spans import Spans
from dearmpi.errors import UsageError


class ClosedEngine(AloneEngine):
    """Parameters are current and stay so; training on would go without the other ranks."""

    def __init__(self, optimizer: Optimizer, times: IterationTimes) -> None:
        super().__init__(optimizer, Spans())
        self.times = times

    def step(self, *, joined: bool = False) -> NoReturn:
        """Refused."""
        refuse_closed("step()")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Refused."""
        refuse_closed("no_sync()")
        yield

    def wait_reduced(self) -> NoReturn:
        """Refused."""
        refuse_closed("reducing gradients")

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """Refused."""
        refuse_closed("reading gradients")

    def shards(self) -> list[Tensor]:
        """Refused."""
        refuse_closed("reading gradients")


def refuse_closed(what: str) -> NoReturn:
    """Raise UsageError for ``what``."""
    raise UsageError(
        f"{what} after close(): this DistributedOptimizer is detached from its model; "
        "make a new one",
        code="optimizer-closed",
    )
