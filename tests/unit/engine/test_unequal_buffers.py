"""Ranks whose models have other buffers, or other tensors that the optimizer does not train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer, broadcast_buffers, broadcast_parameters
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError, MismatchError
from tests.codes import raises
from tests.combinations import turns_of
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks

HOWS = ["average", "broadcast"]


def build() -> Any:
    model = nn.Linear(3, 2)
    model.register_buffer("first", torch.ones(2, 6))
    model.register_buffer("second", torch.ones(4))
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    return model


def wrap(model: Any, world: World, **settings: Any) -> DistributedOptimizer:
    inner = torch.optim.SGD([model.weight, model.bias], lr=0.1)
    return DistributedOptimizer(inner, model, world=world, **settings)


def step(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def swap(model: Any) -> None:
    """Of the same names, in another order."""
    first = model._buffers.pop("first")
    model._buffers["first"] = first


def rename(model: Any) -> None:
    model._buffers = {{"second": "other"}.get(k, k): v for k, v in model._buffers.items()}


def share(model: Any) -> None:
    """The second is known by the first's name alone then."""
    model.first = model.second


def freeze(model: Any, rows: int = 5) -> None:
    model.table = nn.Parameter(torch.ones(rows, 2), requires_grad=False)


CHANGES: dict[str, tuple[Callable[[Any], object], str, str]] = {
    # What one rank does, and what it has then where the others have what.
    "missing": (
        lambda m: delattr(m, "second"),
        "buffer count of shape () (int64 on cpu)",
        "buffer second of shape (4,) (float32 on cpu)",
    ),
    "extra": (
        lambda m: m.register_buffer("more", torch.ones(3)),
        "buffer more of shape (3,) (float32 on cpu)",
        "nothing further",
    ),
    "extra of none": (
        lambda m: m.register_buffer("more", torch.ones(0)),
        "buffer more of shape (0,) (float32 on cpu)",
        "nothing further",
    ),
    "not persistent": (
        lambda m: m.register_buffer("more", torch.ones(3), persistent=False),
        "buffer more of shape (3,) (float32 on cpu)",
        "nothing further",
    ),
    "none": (
        lambda m: setattr(m, "count", None),
        "nothing further",
        "buffer count of shape () (int64 on cpu)",
    ),
    "renamed": (rename, "buffer other of shape (4,)", "buffer second of shape (4,)"),
    "order": (swap, "buffer second of shape (4,)", "buffer first of shape (2, 6)"),
    "shared": (
        share,
        "buffer first of shape (4,) (float32 on cpu)",
        "buffer first of shape (2, 6) (float32 on cpu)",
    ),
    "length": (
        lambda m: setattr(m, "second", torch.ones(5)),
        "buffer second of shape (5,) (float32 on cpu)",
        "buffer second of shape (4,) (float32 on cpu)",
    ),
    "shape": (
        lambda m: setattr(m, "first", torch.ones(4, 3)),
        "buffer first of shape (4, 3) (float32 on cpu)",
        "buffer first of shape (2, 6) (float32 on cpu)",
    ),
    "empty": (
        lambda m: setattr(m, "second", torch.ones(0)),
        "buffer second of shape (0,) (float32 on cpu)",
        "buffer second of shape (4,) (float32 on cpu)",
    ),
    "dtype": (
        lambda m: setattr(m, "count", torch.zeros((), dtype=torch.float64)),
        "buffer count of shape () (float64 on cpu)",
        "buffer count of shape () (int64 on cpu)",
    ),
    "meta": (
        lambda m: setattr(m, "second", torch.ones(4, device="meta")),
        "buffer second of shape (4,) (float32 on meta)",
        "buffer second of shape (4,) (float32 on cpu)",
    ),
    "layout": (
        lambda m: setattr(m, "first", torch.ones(2, 6).to_sparse()),
        "buffer first of shape (2, 6) (float32 on cpu, sparse_coo of tensors of shapes (2, 12) "
        "and (12,)",
        "buffer first of shape (2, 6) (float32 on cpu)",
    ),
    "unsent layout": (
        lambda m: setattr(m, "first", torch.ones(2, 6).to_sparse_csc()),
        "buffer first of shape (2, 6) (float32 on cpu, sparse_csc)",
        "buffer first of shape (2, 6) (float32 on cpu)",
    ),
}
AT_THE_START = {
    **CHANGES,
    "frozen": (freeze, "parameter table of shape (5, 2) (float32 on cpu)", "buffer first of"),
    "strides": (
        lambda m: setattr(m, "first", torch.ones(6, 2).t()),
        "buffer first of shape (2, 6) (float32 on cpu, strides (1, 2))",
        "buffer first of shape (2, 6) (float32 on cpu)",
    ),
}


def mismatch(size: int, function: Callable[[World], object]) -> str:
    """What all of ``size`` ranks are told alike."""

    def rank(world: World) -> str:
        with pytest.raises(MismatchError) as caught:
            function(world)
        world.barrier()  # all ranks are where they were, and can go on
        return str(caught.value)

    said = run_ranks(size, rank)
    assert said == said[:1] * size
    return said[0]


def assert_names(said: str, odd: int, its: str, the_others: str) -> None:
    """Rank 0 is the odd one, or the one that it is compared with."""
    rank, zero = (1, the_others), its
    if odd:
        rank, zero = (odd, its), the_others
    assert f"rank {rank[0]} on fakehost has" in said
    first, _, second = said.partition(" where rank 0")
    assert rank[1] in first and zero in second, said


@pytest.mark.filterwarnings("ignore:Sparse CSC tensor support")
@pytest.mark.parametrize(("size", "odd"), [(2, 0), (3, 2)])
@pytest.mark.parametrize("change", AT_THE_START)
def test_at_the_start_the_first_that_differs_is_named_on_all_ranks(
    change: str, size: int, odd: int
) -> None:
    do, its, the_others = AT_THE_START[change]

    def start(world: World) -> None:
        model = build()
        if world.rank == odd:
            do(model)
        wrap(model, world)

    assert_names(mismatch(size, start), odd, its, the_others)


@pytest.mark.parametrize("rows", [6, 0])
def test_a_frozen_table_of_another_length_is_named(rows: int) -> None:
    def start(world: World) -> None:
        model = build()
        freeze(model, rows if world.rank == 2 else 5)
        wrap(model, world)

    said = mismatch(3, start)
    assert "rank 2 on fakehost has another parameter or buffer outside the optimizer" in said
    assert f"its model has parameter table of shape ({rows}, 2) (float32 on cpu) where" in said


def test_trained_parameters_in_another_order_in_memory_are_named() -> None:
    """Their elements would be added in the order of memory."""

    def start(world: World) -> None:
        model: Any = nn.Conv2d(2, 3, 2)
        if world.rank == 1:
            model = model.to(memory_format=torch.channels_last)
        wrap(model, world)

    said = mismatch(2, start)
    assert "its optimizer has weight of shape (3, 2, 2, 2) (float32 on cpu, strides (8," in said


@pytest.mark.filterwarnings("ignore:Sparse CSC tensor support")
@turns_of(change=[*CHANGES], where=[(2, 1, "broadcast"), (3, 0, "average"), (4, 2, "average")])
def test_a_change_between_steps_is_named_before_anything_is_overwritten(
    change: str, where: tuple[int, int, Any]
) -> None:
    size, odd, how = where
    do, its, the_others = CHANGES[change]

    def train(world: World) -> None:
        model = build()
        optimizer = wrap(model, world, buffers=how)
        step(model, optimizer)
        model.first.fill_(world.rank)
        if world.rank == odd:
            do(model)
        try:
            step(model, optimizer)
        finally:
            if world.rank != odd:
                assert torch.equal(model.first, torch.full((2, 6), float(world.rank)))
            optimizer.close()

    said = mismatch(size, train)
    assert_names(said, odd, its, the_others)
    assert f"or leave out buffers='{how}'" in said


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("odd", [0, 1])
def test_a_first_buffer_on_one_rank_alone_is_named(odd: int, how: Any) -> None:
    """Where nothing is exchanged no step waits; the others learn of it in the next."""

    def train(world: World) -> None:
        model: Any = nn.Linear(3, 2)
        optimizer = wrap(model, world, buffers=how)
        step(model, optimizer)
        if world.rank == odd:
            model.register_buffer("queue", torch.ones(3))
        step(model, optimizer)
        optimizer.close()

    said = mismatch(2, train)
    assert_names(said, odd, "buffer queue of shape (3,)", "nothing further")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("size", [2, 3])
def test_buffers_that_change_alike_are_exchanged_as_they_are(size: int, how: Any) -> None:
    def rank(world: World) -> list[Tensor]:
        model: Any = nn.Linear(3, 2)
        optimizer = wrap(model, world, buffers=how)
        found = []
        for length in (0, 2, 5, 3):
            if length:
                model.register_buffer("queue", torch.full((length,), float(world.rank)))
            step(model, optimizer)
            step(model, optimizer)
            if length:
                found.append(model.queue.clone())
        model.queue = None
        step(model, optimizer)
        optimizer.close()
        return found

    value = (size - 1) / 2 if how == "average" else 0.0
    for found in run_ranks(size, rank):
        assert [part.tolist() for part in found] == [[value] * n for n in (2, 5, 3)]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_buffers_are_averaged(dtype: torch.dtype) -> None:
    def rank(world: World) -> list[complex]:
        model = build()
        model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64).to(dtype))
        optimizer = wrap(model, world, buffers="average")
        own = torch.tensor([1 + 2j * world.rank, world.rank - 4j], dtype=torch.complex64)
        model.phase.copy_(own)
        if world.rank == 1 and dtype is torch.complex64:
            model.phase = own.conj().resolve_conj().conj()  # the same values, not as stored
        step(model, optimizer)
        optimizer.close()
        found: list[complex] = model.phase.to(torch.complex64).tolist()
        return found

    assert run_ranks(3, rank) == [[1 + 2j, 1 - 4j]] * 3


FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
NEWER = [torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []  # not in torch 2.6


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_buffers_are_not_averaged(dtype: torch.dtype) -> None:
    def rank(world: World) -> None:
        model = build()
        model.register_buffer("scale", torch.ones(3).to(dtype))
        with raises(ConfigError, "buffer-not-averaged", dtype, "'broadcast'"):
            wrap(model, world, buffers="average")
        del model.scale
        optimizer = wrap(model, world, buffers="average")
        model.register_buffer("late", torch.ones(3).to(dtype))
        with raises(ConfigError, "buffer-not-averaged", dtype, "'broadcast'"):
            step(model, optimizer)

    run_ranks(2, rank)


@pytest.mark.parametrize("how", ["keep", "broadcast"])
@pytest.mark.parametrize("dtype", [*FLOAT8, torch.bool, torch.uint16, *NEWER])
def test_other_formats_are_rank_0s(dtype: torch.dtype, how: Any) -> None:
    def rank(world: World) -> list[float]:
        model = build()
        model.register_buffer("scale", torch.tensor([float(not world.rank)]).to(dtype))
        optimizer = wrap(model, world, buffers=how)
        if how == "broadcast":
            model.scale.copy_(torch.tensor([float(not world.rank)]).to(dtype))
        step(model, optimizer)
        optimizer.close()
        found: list[float] = model.scale.float().tolist()
        return found

    assert run_ranks(2, rank) == [[1.0]] * 2


def test_sparse_buffers_with_elements_elsewhere_are_not_averaged() -> None:
    def train(world: World) -> None:
        model = build()
        model.register_buffer("mask", torch.eye(3).to_sparse())
        optimizer = wrap(model, world, buffers="average")
        step(model, optimizer)
        if world.rank == 1:
            model.mask = torch.eye(3).flip(0).to_sparse()
        step(model, optimizer)

    said = mismatch(2, train)
    assert "rank 1 on fakehost has other buffers than rank 0 on fakehost: buffer mask of" in said
    assert said.count("its elements in places of hash ") == 2


@pytest.mark.parametrize("send", [broadcast_buffers, broadcast_parameters])
def test_broadcasts_compare_first(send: Callable[..., None]) -> None:
    def call(world: World) -> None:
        model = build()
        model.register_buffer("extra", torch.ones(4 + world.rank))
        freeze(model, 5 + world.rank)
        send(model, world)

    said = mismatch(3, call)
    what = "buffer extra of shape (5,)" if send is broadcast_buffers else "parameter table of"
    assert "rank 1 on fakehost has other" in said and what in said


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (lambda: torch.ones(2, device="meta"), "buffer odd is on the meta device"),
        (lambda: nn.parameter.UninitializedBuffer(), "buffer odd is not initialized"),
    ],
)
def test_buffers_without_values_are_named(tensor: Callable[[], Tensor], said: str) -> None:
    def rank(world: World) -> None:
        model = build()
        model.register_buffer("odd", tensor())
        with pytest.raises(ConfigError, match=said):
            wrap(model, world)
        del model.odd
        wrap(model, world).close()

    run_ranks(2, rank)


@pytest.mark.parametrize("how", HOWS)
def test_an_exchange_is_a_message_per_data_type_and_a_few_numbers(how: Any) -> None:
    """Without buffers only the numbers travel."""

    def sent(make: Callable[[], nn.Module]) -> list[str]:
        hub = FakeHub(2, name=lambda buffer: f"[{buffer.numel()}]")

        def rank(world: World) -> None:
            model = make()
            optimizer = wrap(model, world, buffers=how)
            step(model, optimizer)
            optimizer.synchronize()
            hub.mark(world.rank)
            step(model, optimizer)
            optimizer.close()

        run_ranks(2, rank, hub=hub)
        seen = hub.picture(0).rpartition("|")[2].split()
        return [label for label in seen if label in ("AR[3]", floats, "BC[1]")]

    floats = "AR[16]" if how == "average" else "BC[16]"
    assert sent(build) == ["AR[3]", floats, "BC[1]"]
    assert sent(lambda: nn.Linear(3, 2)) == ["AR[3]"]
