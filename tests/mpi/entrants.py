"""Methods for the benchmark's tests: ones that fail in various ways, and a plug-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dearmpi.bench.method import Entrant, Factory, Setup
from dearmpi.bench.torch_methods import ddp


def plug_in(setup: Setup) -> Entrant:
    """What a user might bring: DDP under another name."""
    return ddp(setup)


def fails_to_enter(rank: int) -> Factory:
    """Cannot be built on ``rank``, while the others already wait for it."""

    def enter(setup: Setup) -> Entrant:
        if setup.world.rank == rank:
            raise OSError("no such accelerator")
        return ddp(setup)

    return enter


def fails_in_backprop(rank: int, *, at: int) -> Factory:
    """Breaks in the backprop ``at`` of ``rank``, so that it misses the others' all-reduce."""

    def enter(setup: Setup) -> Entrant:
        entrant = ddp(setup)
        calls: list[Any] = []

        def backward(loss: Tensor) -> None:
            calls.append(loss)
            if setup.world.rank == rank and len(calls) == at:
                raise FloatingPointError("broken in two\nwith details below")
            loss.backward()

        return Entrant(entrant.model, entrant.optimizer, backward=backward)

    return enter


def forgets_others(setup: Setup) -> Entrant:
    """Trains each rank by itself, which is no data parallelism."""
    return Entrant(setup.model, setup.make_optimizer(setup.model.parameters()))


def fails_to_close(close: Callable[[], None]) -> Factory:
    """Calls ``close`` at its end."""

    def enter(setup: Setup) -> Entrant:
        return Entrant(
            ddp(setup).model, setup.make_optimizer(setup.model.parameters()), close=close
        )

    return enter
