"""What travels at the start: what ranks do not have the same of already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer, LocalOptimizer, broadcast_buffers, broadcast_parameters
from dearmpi.comm.world import World
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks
from tests.mpi.oracle import copies

HOSTS = ["left", "left", "right"]
Make = Callable[[nn.Module, World], Any]


def build(seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(300, 80), nn.BatchNorm1d(80), nn.Linear(80, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return model


def dense(model: nn.Module, world: World) -> Any:
    return DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, world=world)


def local(model: nn.Module, world: World) -> Any:
    return LocalOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, world=world)


def phased(model: nn.Module, world: World) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return LocalOptimizer(inner, model, sync_after=5, world=world)


def posted(hub: FakeHub) -> tuple[int, int]:
    """Bytes that rank 0 has posted so far, in broadcasts and in all else."""
    values = others = 0
    for record in hub.records:
        kind, _, nbytes = record.label.partition(" ")
        if record.rank == 0 and kind == "BC":
            values += int(nbytes)
        elif record.rank == 0:
            others += int(nbytes or 0)
    return values, others


def join(hosts: list[str]) -> FakeHub:
    def name(buffer: Any) -> str:
        return f" {buffer.numel() * buffer.element_size()}"

    return FakeHub(len(hosts), hosts=hosts, name=name)


def sent(make: Make, change: Callable[[nn.Module, int], None], hosts: list[str]) -> tuple[int, int]:
    """As ``posted``, until the optimizer is made; all ranks then have rank 0's values."""
    hub = join(hosts)

    def start(world: World) -> tuple[dict[str, Any], tuple[int, int]]:
        model = build()
        change(model, world.rank)
        own = copies(model)
        made = make(model, world)
        found, nbytes = copies(model), posted(hub)
        if made is not None:
            made.close()
        return {name: (value, own[name]) for name, value in found.items()}, nbytes

    (first, nbytes), *others = run_ranks(len(hosts), start, hub=hub)
    for other, _ in others:
        for name, (value, _) in other.items():
            assert torch.equal(_bits(value), _bits(first[name][1])), name
    return nbytes


def _bits(tensor: Any) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8)


def leave(model: nn.Module, rank: int) -> None:
    """The same on all ranks."""


def number(index: int, place: int) -> Callable[[Any, int], None]:
    def change(model: Any, rank: int) -> None:
        if rank == 1:
            model[index].weight.data.view(-1)[place] += 1

    return change


def reseed(model: nn.Module, rank: int) -> None:
    model.load_state_dict(build(rank).state_dict())


WHOLE = sum(param.numel() for param in build().parameters()) * 4


@pytest.mark.parametrize("make", [dense, local, phased, broadcast_parameters, broadcast_buffers])
def test_equal_ranks_send_hashes_alone(make: Make) -> None:
    values, others = sent(make, leave, HOSTS)
    assert values == 0 and others < WHOLE / 4


@pytest.mark.parametrize("make", [dense, local, phased, broadcast_parameters])
@pytest.mark.parametrize(
    ("change", "nbytes"),
    [(number(0, 0), 300 * 80 * 4), (number(0, -1), 300 * 80 * 4), (number(2, 7), 80 * 3 * 4)],
    ids=["head", "last", "small"],
)
def test_only_a_tensor_that_differs_is_sent(make: Make, change: Any, nbytes: int) -> None:
    assert sent(make, change, HOSTS)[0] == nbytes


@pytest.mark.parametrize("make", [dense, local, phased])
def test_ranks_with_other_seeds_get_the_model_once(make: Make) -> None:
    """All but what batch normalisation begins with, if that is equal, and not for each part of
    local steps again.
    """
    assert sent(make, reseed, HOSTS)[0] == WHOLE


def test_within_one_host_nothing_is_hashed() -> None:
    assert sent(broadcast_parameters, leave, ["here"] * 3)[0] == WHOLE


def _last(value: Any, other: Any) -> Any:
    """``other`` on rank 1 in the last place, else ``value``."""
    return lambda rank: torch.tensor([value] * 2000 + [other if rank == 1 else value])


@pytest.mark.parametrize(
    ("of_rank", "is_sent"),
    [
        (_last(True, False), True),
        (_last(7, 2**40), True),
        (_last(0.0, -0.0), True),
        (_last(float("nan"), float("nan")), False),
        (_last(1j, 2j), True),
        (lambda rank: _last(1.0, 1.01)(rank).bfloat16(), True),
        (lambda rank: torch.tensor(float(rank)), True),
        (lambda rank: torch.full((40, 50), float(rank)).t(), True),
        (lambda rank: (torch.arange(4000.0) * (1 + rank))[::2], True),
        (lambda rank: torch.full((1, 1), float(rank)).expand(30, 30), True),
        (lambda rank: torch.tensor([1j * rank]).conj(), True),
        (lambda rank: torch.eye(3).mul(1 + rank).to_sparse(), True),
        (lambda rank: torch.zeros(0), False),
    ],
    ids=str,
)
def test_any_bits_count_of_any_kind_of_tensor(of_rank: Any, is_sent: bool) -> None:
    hub = join(HOSTS)

    def start(world: World) -> Any:
        model: Any = nn.Module()
        model.register_buffer("value", of_rank(world.rank))
        broadcast_buffers(model, world)
        return model.value.to_dense()

    for found in run_ranks(3, start, hub=hub):
        assert torch.equal(_bits(found.resolve_conj()), _bits(of_rank(0).to_dense().resolve_conj()))
    assert (posted(hub)[0] > 0) == is_sent
