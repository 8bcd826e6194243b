"""Half precision on the wire: no coarser than documented, and refused where MPI cannot add it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from dearmpi.comm.api.collectives import Collectives
from dearmpi.comm.progress.channel import Channel
from dearmpi.comm.world import World
from dearmpi.config import ReduceScatter, WireDtype
from dearmpi.errors import ConfigError
from tests.codes import raises
from tests.mpi.collectives.contributions import (
    ADDED_HERE,
    HALF,
    SHARDS,
    contribution,
    gather,
    own,
    scatter,
    total,
    whole_numel,
)

WIRE_DTYPES: dict[WireDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("dtype", HALF)
def test_exchange_rounds_half_precision_once(
    world: World, channels: list[Channel], dtype: torch.dtype
) -> None:
    """Adding in half precision, one after the other, would lose each of the small ones."""
    large = {torch.float16: 2048.0, torch.bfloat16: 256.0}[dtype]
    mine = torch.full((world.size,), 1.0 if world.rank else large, dtype=dtype)
    channels[0].run("RS", scatter(mine, "exchange"))
    assert own(world, mine) == torch.tensor(large + world.size - 1).to(dtype)


def drawn(rank: int, numel: int) -> Tensor:
    """Numbers that no half precision holds, different on every rank."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
@pytest.mark.parametrize("algorithm", ADDED_HERE)
def test_half_precision_on_the_wire_is_off_by_no_more_than_documented(
    world: World,
    channels: list[Channel],
    algorithm: ReduceScatter,
    wire_dtype: WireDtype,
    shard: int,
) -> None:
    numel = whole_numel(world, shard, torch.float32)
    terms = torch.stack([drawn(rank, numel) for rank in range(world.size)]).double()
    buffer = drawn(world.rank, numel)
    channels[0].run("RS", scatter(buffer, algorithm, wire_dtype))
    unit_roundoff = torch.finfo(WIRE_DTYPES[wire_dtype]).eps / 2
    num_roundings = min(1, world.size - 1) if algorithm == "exchange" else world.size - 1
    factor = (1 + unit_roundoff) ** num_roundings - 1 + 1e-6  # fp32 sums round a little as well
    bound = own(world, factor * terms.abs().sum(0)) + world.size * 1e-7  # fp16 near zero
    error = (own(world, buffer).double() - own(world, terms.sum(0))).abs()
    assert bool((error <= bound).all())
    if world.size > 1 and numel > 1000:
        assert float(error.max()) > 1e-6, "nothing was rounded, so nothing was saved"


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_a_gather_in_half_precision_leaves_the_same_bits_everywhere(
    world: World, channels: list[Channel], wire_dtype: WireDtype, shard: int
) -> None:
    numel = whole_numel(world, shard, torch.float32)
    whole = drawn(0, numel)
    buffer = torch.full((numel,), -1.0)
    own(world, buffer).copy_(own(world, whole))
    channels[1].run("AG", gather(buffer, wire_dtype))
    rounded = whole.to(WIRE_DTYPES[wire_dtype]).float()
    assert torch.equal(buffer, rounded if world.size > 1 else whole)


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
@pytest.mark.parametrize("algorithm", ADDED_HERE)
def test_what_half_precision_cannot_hold_is_seen(
    world: World, channels: list[Channel], algorithm: ReduceScatter, wire_dtype: WireDtype
) -> None:
    buffer = torch.zeros(3 * world.size)
    if world.rank == world.size - 1:
        buffer[::3], buffer[1::3], buffer[2::3] = torch.nan, torch.inf, 1e6
    channels[0].run("RS", scatter(buffer, algorithm, wire_dtype))
    nan, infinite, large = own(world, buffer)
    assert nan.isnan() and infinite.isposinf()
    if world.size > 1 and algorithm == "exchange":
        # In a ring the last to add does not send, so that a shard may keep what fp16 cannot hold.
        assert large.isposinf() if wire_dtype == "fp16" else abs(large - 1e6) < 4e3


@pytest.mark.parametrize("algorithm", ADDED_HERE)
@pytest.mark.parametrize("dtype", HALF)
def test_buffers_that_are_no_wider_travel_as_they_are(
    world: World, channels: list[Channel], algorithm: ReduceScatter, dtype: torch.dtype
) -> None:
    numel = 7 * world.size
    buffer = contribution(world.rank, numel, dtype)
    channels[0].run("RS", scatter(buffer, algorithm, "bf16"))
    assert torch.equal(own(world, buffer), own(world, total(world, numel, dtype)))


@pytest.mark.parametrize("algorithm", ADDED_HERE)
def test_several_in_half_precision_in_flight_do_not_share_memory(
    world: World, channels: list[Channel], algorithm: ReduceScatter
) -> None:
    """Small whole numbers stay exact, so that a buffer used twice at once would show."""
    sizes = [(1 + 3000 * (bucket % 4)) * world.size for bucket in range(12)]
    buffers = [
        contribution(world.rank, numel, torch.float32, salt) for salt, numel in enumerate(sizes)
    ]
    done: list[int] = []
    for buffer in buffers:
        channels[0].submit("RS", scatter(buffer, algorithm, "bf16"), partial(done.append, 1))
        channels[1].submit("AG", gather(torch.ones(world.size), "bf16"), partial(done.append, 1))
    world.progress.wait_until(lambda: len(done) == 24, what="all of them")
    for salt, (buffer, numel) in enumerate(zip(buffers, sizes, strict=True)):
        assert torch.equal(own(world, buffer), own(world, total(world, numel, torch.float32, salt)))


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("dtype", HALF)
def test_native_refuses_half_precision_and_names_what_serves(
    collectives: Collectives, world: World, dtype: torch.dtype
) -> None:
    name = str(dtype).removeprefix("torch.")
    with raises(ConfigError, "dtype-not-served", "'native'", name, "'exchange'"):
        collectives.start_reduce_scatter(torch.ones(world.size, dtype=dtype), "native")


@pytest.mark.ranks(at_least=2)
def test_native_refuses_half_precision_on_the_wire(collectives: Collectives, world: World) -> None:
    with raises(ConfigError, "dtype-not-served", "'native'", "bfloat16", "'exchange'"):
        collectives.start_reduce_scatter(torch.ones(world.size), "native", wire_dtype="bf16")
