"""Collectives over MPI, at any number of ranks: right sums, several at once, buffers that live."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import get_args

import pytest
import torch
from torch import Tensor

from dearmpi.comm.api import Buffer, Collectives, ReduceOp, Request
from dearmpi.comm.choose import fastest_reduce_scatter
from dearmpi.comm.world import Channel, World
from dearmpi.config import AllGather, ReduceScatter, WireDtype
from dearmpi.errors import CommError, ConfigError

LIMIT_S = 60.0  # far beyond what any of this takes; reached only by a deadlock
ALGORITHMS: list[ReduceScatter] = ["native", "ring", "exchange"]
WIDE = [torch.float32, torch.float64]
HALF = [torch.bfloat16, torch.float16]
SUPPORTED = [
    (algorithm, dtype)
    for algorithm, dtype in product(ALGORITHMS, WIDE + HALF)
    if not (algorithm == "native" and dtype in HALF)
]
LARGE = 0  # stands for shards that make a little more than 1 MiB together
SHARDS = [1, 7, 1001, LARGE]
WIRE_DTYPES: dict[WireDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module")
def channels(world: World) -> list[Channel]:
    """Two channels, as the engine has them."""
    return [world.open_channel(name, window=4) for name in ("rs", "ag")]


def contribution(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """Small whole numbers, different on every rank, whose sums are exact in any dtype."""
    return ((torch.arange(numel) * 7 + rank * 3 + salt) % 11 - 5).to(dtype)


def total(world: World, numel: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    whole = torch.zeros(numel)
    for rank in range(world.size):
        whole += contribution(rank, numel, torch.float32, salt)
    return whole.to(dtype)


def whole_numel(world: World, shard: int, dtype: torch.dtype) -> int:
    return (shard or 2**20 // (world.size * dtype.itemsize) + 13) * world.size


def own(world: World, buffer: Tensor) -> Tensor:
    count = buffer.numel() // world.size
    return buffer[world.rank * count : (world.rank + 1) * count]


def scatter(
    buffer: Buffer, algorithm: ReduceScatter, wire_dtype: WireDtype | None = None
) -> Callable[[Collectives], Request]:
    return lambda c: c.start_reduce_scatter(buffer, algorithm, wire_dtype=wire_dtype)


def gather(
    buffer: Buffer, wire_dtype: WireDtype | None = None, algorithm: AllGather = "ring"
) -> Callable[[Collectives], Request]:
    return lambda c: c.start_all_gather(buffer, algorithm, wire_dtype=wire_dtype)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize(("algorithm", "dtype"), SUPPORTED)
def test_reduce_scatter(
    world: World,
    channels: list[Channel],
    algorithm: ReduceScatter,
    dtype: torch.dtype,
    shard: int,
) -> None:
    numel = whole_numel(world, shard, dtype)
    buffer = contribution(world.rank, numel, dtype)
    channels[0].run("RS", scatter(buffer, algorithm))
    assert torch.equal(own(world, buffer), own(world, total(world, numel, dtype)))


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("dtype", WIDE + HALF)
@pytest.mark.parametrize("algorithm", get_args(AllGather))
def test_all_gather(
    world: World, channels: list[Channel], algorithm: AllGather, dtype: torch.dtype, shard: int
) -> None:
    numel = whole_numel(world, shard, dtype)
    buffer = torch.full((numel,), -1.0, dtype=dtype)
    whole = contribution(0, numel, dtype)
    own(world, buffer).copy_(own(world, whole))
    channels[1].run("AG", gather(buffer, algorithm=algorithm))
    assert torch.equal(buffer, whole)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_not_a_number_stays_so(
    world: World, channels: list[Channel], algorithm: ReduceScatter
) -> None:
    buffer = torch.zeros(2 * world.size)
    if world.rank == world.size - 1:
        buffer[::2], buffer[1::2] = torch.nan, torch.inf
    channels[0].run("RS", scatter(buffer, algorithm))
    shard = own(world, buffer)
    assert shard[0].isnan() and shard[1].isposinf()


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
@pytest.mark.parametrize("algorithm", ["ring", "exchange"])
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
@pytest.mark.parametrize("algorithm", ["ring", "exchange"])
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


@pytest.mark.parametrize("algorithm", ["ring", "exchange"])
@pytest.mark.parametrize("dtype", HALF)
def test_buffers_that_are_no_wider_travel_as_they_are(
    world: World, channels: list[Channel], algorithm: ReduceScatter, dtype: torch.dtype
) -> None:
    numel = 7 * world.size
    buffer = contribution(world.rank, numel, dtype)
    channels[0].run("RS", scatter(buffer, algorithm, "bf16"))
    assert torch.equal(own(world, buffer), own(world, total(world, numel, dtype)))


@pytest.mark.parametrize("algorithm", ["ring", "exchange"])
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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_same_sums_twice(
    world: World, channels: list[Channel], algorithm: ReduceScatter
) -> None:
    """Numbers whose sum depends on the order of adding: the order is always the same."""
    generator = torch.Generator().manual_seed(world.rank)
    values = torch.randn(1001 * world.size, generator=generator)
    runs = []
    for _ in range(3):
        buffer = values.clone()
        channels[0].run("RS", scatter(buffer, algorithm))
        channels[1].run("AG", gather(buffer))
        runs.append(buffer)
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


@pytest.mark.parametrize(("op", "expected"), [("sum", sum), ("max", max), ("min", min)])
def test_all_reduce(
    world: World, channels: list[Channel], op: ReduceOp, expected: Callable[[list[int]], int]
) -> None:
    buffer = torch.full((3,), float(world.rank - 1), dtype=torch.float64)
    channels[0].run("AR", lambda c: c.start_all_reduce(buffer, op))
    assert buffer.tolist() == [float(expected([r - 1 for r in range(world.size)]))] * 3


@pytest.mark.parametrize("dtype", [*WIDE, *HALF, torch.int64, torch.bool])
@pytest.mark.parametrize("numel", [1, 777_777])
def test_broadcast(world: World, dtype: torch.dtype, numel: int) -> None:
    root = world.size - 1
    buffer = contribution(world.rank, numel, dtype)
    world.broadcast(buffer, root=root)
    assert torch.equal(buffer, contribution(root, numel, dtype))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_several_in_flight_on_two_channels(
    world: World, channels: list[Channel], algorithm: ReduceScatter
) -> None:
    """Reduce-scatters under way while all-gathers are, each channel in an order of its own."""
    sizes = [(1 + 3000 * (bucket % 4)) * world.size for bucket in range(12)]
    reduced, gathered = [
        [contribution(world.rank, numel, torch.float32, salt) for salt, numel in enumerate(sizes)]
        for _ in range(2)
    ]
    done: list[int] = []
    for bucket in range(12):
        channels[0].submit(
            f"RS{bucket}", scatter(reduced[bucket], algorithm), partial(done.append, 1)
        )
    for bucket in reversed(range(12)):
        channels[1].submit(f"AG{bucket}", gather(gathered[bucket]), partial(done.append, 1))
    world.progress.wait_until(lambda: len(done) == 24, what="all of them")
    for salt, numel in enumerate(sizes):
        expected = total(world, numel, torch.float32, salt)
        assert torch.equal(own(world, reduced[salt]), own(world, expected))
        rows = [contribution(rank, numel, torch.float32, salt) for rank in range(world.size)]
        shards = [row.chunk(world.size)[rank] for rank, row in enumerate(rows)]
        assert torch.equal(gathered[salt], torch.cat(shards))


@pytest.fixture
def collectives() -> Collectives:
    """A communicator of the test's own, which the test drives itself."""
    from dearmpi.comm import mpi

    if not mpi.supports_threads():
        pytest.skip("a second driver needs MPI_THREAD_MULTIPLE")
    return mpi.connect()


def start_in_turn(collectives: Collectives, buffer: Tensor, number: int) -> Request:
    """One operation after the other, the same on every rank."""
    starts: list[Callable[[], Request]] = [
        *(partial(collectives.start_reduce_scatter, buffer, a) for a in ALGORITHMS),
        *(partial(collectives.start_all_gather, buffer, a) for a in get_args(AllGather)),
        partial(collectives.start_all_reduce, buffer, "sum"),
        partial(collectives.start_broadcast, buffer, number % collectives.size),
    ]
    return starts[number % len(starts)]()


def expected_of(world: World, numel: int, number: int) -> Tensor:
    """What ``start_in_turn`` leaves in this rank's shard."""
    turn = number % 7
    if turn in (0, 1, 2, 5):
        whole = total(world, numel, torch.float32, number)
    else:
        sender = world.rank if turn in (3, 4) else number % world.size
        whole = contribution(sender, numel, torch.float32, number)
    return own(world, whole)


@pytest.mark.ranks(at_least=2)
def test_buffers_that_the_caller_drops_live_until_the_operation_is_complete(
    world: World, collectives: Collectives
) -> None:
    """Ranks in turn drop the buffer they have just posted, and its memory is soon used again.

    What they sent must reach the others, and what they receive must not end up in the new owners'
    memory.
    """
    numel = 25_000 // world.size * world.size  # small enough for memory to be reused at once
    generator = torch.Generator().manual_seed(world.rank)
    for first in range(0, 63, 7):
        requests: list[Request] = []
        kept: dict[int, Tensor] = {}
        owners: list[Tensor] = []
        for number in range(first, first + 7):
            buffer = contribution(world.rank, numel, torch.float32, number)
            requests.append(start_in_turn(collectives, buffer, number))
            if (number + first // 7 + world.rank) % 2:
                kept[number] = buffer
            del buffer
            owners += [torch.full((numel,), 77.0) for _ in range(3)]
            if torch.rand((), generator=generator) < 0.5:
                requests[-1].test()
        gc.collect(1)
        complete(requests)
        for number, buffer in kept.items():
            assert torch.equal(own(world, buffer), expected_of(world, numel, number)), number
        assert all(bool((owner == 77.0).all()) for owner in owners)


def complete(requests: Sequence[Request]) -> None:
    """Poll ``requests`` until all are complete."""
    deadline = time.monotonic() + LIMIT_S
    left = list(requests)
    while left := [request for request in left if not request.test()]:
        assert time.monotonic() < deadline, "operations did not complete"
        time.sleep(0)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lengths_that_do_not_divide_are_refused(
    world: World, collectives: Collectives, algorithm: ReduceScatter
) -> None:
    with pytest.raises(CommError, match=f"{world.size + 1} elements over {world.size} ranks"):
        collectives.start_reduce_scatter(torch.ones(world.size + 1), algorithm)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("dtype", HALF)
def test_native_refuses_half_precision_and_names_what_serves(
    collectives: Collectives, world: World, dtype: torch.dtype
) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ConfigError, match=f"'native', but MPI cannot add {name}; .*'exchange'"):
        collectives.start_reduce_scatter(torch.ones(world.size, dtype=dtype), "native")


@pytest.mark.ranks(at_least=2)
def test_native_refuses_half_precision_on_the_wire(collectives: Collectives, world: World) -> None:
    with pytest.raises(ConfigError, match="'native', but MPI cannot add bfloat16; .*'exchange'"):
        collectives.start_reduce_scatter(torch.ones(world.size), "native", wire_dtype="bf16")


@pytest.mark.parametrize("wire_dtype", [None, "bf16"])
def test_the_fastest_is_one_that_serves(world: World, wire_dtype: WireDtype | None) -> None:
    chosen = fastest_reduce_scatter(world, torch.ones(world.size), wire_dtype=wire_dtype)
    assert set(world.all_gather_text(chosen)) == {chosen}
    assert chosen in ALGORITHMS and (wire_dtype is None or chosen != "native")
