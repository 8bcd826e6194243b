"""Ranks with other buffers, over MPI: none sends what another cannot take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dearmpi import SyncBatchNorm, broadcast_buffers
from dearmpi.comm.world import World
from dearmpi.errors import MismatchError
from tests.codes import raises
from tests.unit.engine.test_unequal_buffers import build, step, wrap

pytestmark = pytest.mark.ranks(2, 3)


@pytest.mark.parametrize("odd", [0, 1])
def test_another_buffer_at_the_start_is_named_on_all_ranks(odd: int, world: World) -> None:
    model = build()
    if world.rank == odd:
        model.second = torch.ones(200_000)
    for call in (wrap, broadcast_buffers):
        with pytest.raises(MismatchError) as caught:
            call(model, world)
        said = str(caught.value)
        assert "buffer second of shape (200000,)" in said and "buffer second of shape (4,)" in said
    assert world.all_reduce([1.0]) == [world.size]


@pytest.mark.parametrize("how", ["average", "broadcast"])
@pytest.mark.parametrize("odd", [0, 1])
def test_a_buffer_that_grows_on_one_rank_is_named_on_all(odd: int, how: Any, world: World) -> None:
    """And where it grows on all of them, its values are right."""
    model = build()
    optimizer = wrap(model, world, buffers=how)
    step(model, optimizer)
    model.second = torch.full((200_000,), float(world.rank))
    step(model, optimizer)
    value = (world.size - 1) / 2 if how == "average" else 0.0
    assert torch.equal(model.second, torch.full((200_000,), value))
    if world.rank == odd:
        model.second = torch.ones(8)
    with raises(MismatchError, "ranks-built-differently", "8", "200000"):
        step(model, optimizer)
    optimizer.close()


@pytest.mark.parametrize("odd", [0, 1])
def test_layers_with_other_channels_are_named_on_all_ranks(odd: int, world: World) -> None:
    layer, other = SyncBatchNorm(4, world=world), SyncBatchNorm(9000, world=world)
    with raises(MismatchError, "ranks-call-layers-differently", "4", "9000"):
        if world.rank == odd:
            other(torch.ones(2, 9000))
        else:
            layer(torch.ones(2, 4))
    rows = [torch.arange(8.0).view(2, 4) ** (1 + rank) for rank in range(world.size)]
    expected = nn.BatchNorm1d(4)(torch.cat(rows))[2 * world.rank :][:2]
    torch.testing.assert_close(layer(rows[world.rank]), expected)
