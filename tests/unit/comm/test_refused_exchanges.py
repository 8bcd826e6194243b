"""What the world would exchange wrongly is refused before it is begun."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dearmpi.comm.messages.host import HostBuffer
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from tests.fakes.ranks import run_ranks

REFUSED: dict[str, tuple[Callable[[World], object], str]] = {
    "every other element": (
        lambda world: world.broadcast(torch.zeros(10)[::2]),
        "broadcast of 5 elements that do not lie side by side in memory",
    ),
    "a column": (
        lambda world: world.all_gather(HostBuffer(np.zeros((4, 2))[:, 0])),
        "all-gather of 4 elements that do not lie side by side",
    ),
    "shards of unequal length": (
        lambda world: world.all_gather(torch.zeros(5)),
        "all-gather of 5 elements over 2 ranks: the length must be a multiple",
    ),
    "a matrix of values": (
        lambda world: world.all_reduce(np.zeros((2, 3))),
        r"values have the shape \(2, 3\)",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_exchanged_wrongly_is_refused_before_it_is_begun(what: str) -> None:
    exchange, said = REFUSED[what]

    def try_it(world: World) -> list[float]:
        with pytest.raises(ConfigError, match=said):
            exchange(world)
        return world.all_reduce([1.0])

    assert run_ranks(2, try_it) == [[2.0]] * 2
