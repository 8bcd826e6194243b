"""What the world would exchange wrongly is refused before it is begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dearmpi.comm.messages.values import HostBuffer
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from tests.codes import raises
from tests.fakes.ranks import run_ranks

REFUSED: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "every other element": (
        lambda world: world.broadcast(torch.zeros(10)[::2]),
        "buffer-not-contiguous",
        "broadcast of 5 elements",
    ),
    "a column": (
        lambda world: world.all_gather(HostBuffer(np.zeros((4, 2))[:, 0])),
        "buffer-not-contiguous",
        "all-gather of 4 elements",
    ),
    "shards of unequal length": (
        lambda world: world.all_gather(torch.zeros(5)),
        "buffer-not-divisible",
        "all-gather of 5 elements over 2 ranks",
    ),
    "a matrix of values": (
        lambda world: world.all_reduce(np.zeros((2, 3))),
        "values-not-flat",
        "(2, 3)",
    ),
    "a tensor without memory": (
        lambda world: world.broadcast(torch.zeros(3, device="meta")),
        "wrong-type",
        "meta device",
    ),
    "conjugates, whose memory holds other numbers": (
        lambda world: world.broadcast(torch.tensor([1 + 2j]).conj()),
        "buffer-not-contiguous",
        "broadcast of 1 elements",
    ),
    "a root that is no whole number": (
        lambda world: world.broadcast_object(1, root=0.0),
        "wrong-type",
        "root is 0.0, of type float",
    ),
    "no root": (
        lambda world: world.broadcast(torch.zeros(3), root=None),
        "wrong-type",
        "root is None",
    ),
    "bytes in place of a text": (
        lambda world: world.all_gather_text(b"text"),
        "wrong-type",
        "type bytes",
    ),
    "a number in place of a text": (
        lambda world: world.broadcast_text(3),
        "wrong-type",
        "type int",
    ),
    "a weight that is no number": (
        lambda world: world.loss_weight(None if world.is_root else 1.0),
        "out-of-range",
        "1 of 2 ranks",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_exchanged_wrongly_is_refused_before_it_is_begun(what: str) -> None:
    exchange, code, said = REFUSED[what]

    def try_it(world: World) -> list[float]:
        with raises(ConfigError, code, said):
            exchange(world)
        return world.all_reduce([1.0])

    assert run_ranks(2, try_it) == [[2.0]] * 2


def test_a_root_may_be_a_number_of_numpy() -> None:
    assert run_ranks(2, lambda world: world.broadcast_object(world.rank, np.int64(1))) == [1, 1]
