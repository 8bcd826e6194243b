"""What every codec owes its users, whatever it sends: equal replicas, true counts, exact sums.

Where the promises of a codec, the bugs of published code and bad input are tested:

| promise, published bug or bad input | test |
|---|---|
| replicas equal to the bit after 50 steps: all ranks decode alike | here, ``mpi/test_compress`` |
| ``traffic`` is what the wire carries | here, ``test_compress``, ``test_compressed_owners`` |
| density 1 has the bits of a dense bucket | ``mpi/test_compress`` |
| whole numbers within the codes are exact | ``test_compress``, ``test_sketch`` |
| what is not sent is kept, in whole numbers | ``test_sparse``, ``test_selected`` |
| owners' estimates of gradients (EF21) | ``test_estimates`` |
| errors of a sum, and of replicas beside masters | here, ``test_quantized``, ``test_compress`` |
| shared coordinates need no message | here |
| biased codecs need error feedback, and warn without | here, ``test_error_feedback`` |
| PowerSGD is that of a model in numpy | ``test_powersgd`` |
| ``nonzero`` has the bits of a dense run, of unusual numbers too | ``test_nonzero`` |
| resumed on other ranks, in other buckets, by another codec | ``test_compress``, ``test_sparse`` |
| NaN, loss scales, dropped steps, clipping | ``test_sparse``, ``test_loss_scale`` |
| LHC guesses what it cannot decode | ``test_sketch``: the same cells |
| LHC's 1.23 cells for each key fail in practice | ``test_sketch``: few cells |
| TAGC adds up packed flags, which carry | ``test_nonzero``, ``test_sketch``: flags of many ranks |
| GRACE draws an element twice | ``test_sparse``: without repetition |
| GRACE hangs on an empty selection | here: gradients of zero |
| DeMo decodes to other bits on other devices | as replicas; ``test_quantized``: rounded apart |
| ARC-TopK fails where blocks do not divide a tensor | ``test_sparse``: 310 elements |
| a rank dies between the choice of blocks and their values | ``mpi/test_faults`` |
| values out of range, without effect, in contradiction | ``test_sparse``, ``test_selected`` |
| an optimizer that is not linear in the gradient | ``test_sparse``: refused with cures |
| settings that differ between ranks | ``mpi/test_semantics_arguments`` |

``error_feedback="none"`` is not refused with a biased codec, since the comparison of the paper on
sparse communication needs it: rank 0 warns. There is no setting of the seed, which could differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import Compress
from dearmpi.engine.bucket import bucket
from tests.combinations import turns_of
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks
from tests.mpi.oracle import copies
from tests.unit.engine.test_compress import make_wide_model, regress

CODECS: list[dict[str, Any]] = [
    {"compress": "int8"},
    {"compress": "int8", "gather": "gradients"},
    {"compress": "int4"},
    {"compress": "int4", "gather": "gradients"},
    {"compress": "nonzero"},
    {"compress": "nonzero", "gather": "gradients"},
    {"compress": "sketch"},
    {"compress": "powersgd", "gather": "gradients", "powersgd_rank": 2},
    *(
        {"compress": compress, "density": 0.1, "error_feedback": feedback}
        for compress in ("random-block", "random-k", "topk", "block-topk")
        for feedback in ("ef14", "ef21", "none")
    ),
    {"compress": "topk", "density": 0.1, "scope": "model"},
    {"compress": "topk", "density": 0.1, "coordinates": "shared"},
    {"compress": "random-k", "density": 0.1, "coordinates": "own", "scope": "parameter"},
]


@pytest.fixture(autouse=True)
def _small_buckets_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bucket, "_LEAST_COMPRESSED", 1)
    yield


def wrap(model: nn.Module, world: World, **settings: Any) -> DistributedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    return DistributedOptimizer(inner, model, world=world, **settings)


@turns_of(codec=CODECS, size=[3, 2, 4])
def test_replicas_are_equal_to_the_bit_after_50_steps(codec: dict[str, Any], size: int) -> None:
    def rank(world: World) -> dict[str, Tensor]:
        model = make_wide_model()
        optimizer = wrap(model, world, bucket_cap_mb=0.004, **codec)
        losses = regress(model, optimizer, world, steps=50)
        optimizer.close()
        # Of all ranks, whose few samples differ more than some codecs learn in 50 steps.
        first, last = world.all_reduce([sum(losses[:5]), sum(losses[-5:])], "sum")
        assert last < 0.9 * first
        return copies(model)

    first, *others = run_ranks(size, rank)
    for other in others:
        assert all(torch.equal(other[name], value) for name, value in first.items())


@turns_of(codec=CODECS, size=[2, 3])
def test_what_is_counted_is_what_the_wire_carries(codec: dict[str, Any], size: int) -> None:
    """Of a step after the first ones, some of which are dense; an all-reduce counts once."""
    carried: list[int] = []

    def seconds(label: str, sent: int) -> float:
        if label[:2] in ("RS", "AG", "EX") or label == "ARflags":
            carried.append(sent)
        return 0.0

    def name(buffer: Any) -> str:
        return "flags" if getattr(buffer, "dtype", None) is torch.uint8 else ""

    def rank(world: World) -> tuple[int, int, int]:
        model = nn.Linear(64, 300, bias=False)
        optimizer = wrap(model, world, bucket_cap_mb=1.0, **codec)
        for step in range(4):
            if step == 3:
                optimizer.synchronize()
                world.barrier()
                if world.is_root:
                    carried.clear()
                world.barrier()
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(9 * step + world.rank)
            factors = torch.randn(300, 64, generator=generator)
            factors[torch.arange(300) % 20 > 0] = 0.0  # most blocks
            (model.weight * factors).sum().backward()
            optimizer.step()
        optimizer.synchronize()
        world.barrier()
        traffic, on_the_wire = optimizer.traffic, sum(carried) // size * (size - 1)
        world.barrier()
        optimizer.close()
        return traffic.reduced + traffic.gathered, on_the_wire, traffic.dense

    hub = FakeHub(size, seconds=seconds, name=name)
    for counted, on_the_wire, dense in run_ranks(size, rank, hub=hub):
        assert counted == on_the_wire < dense


@pytest.mark.parametrize("compress", ["random-block", "random-k"])
def test_coordinates_that_follow_from_the_step_need_no_message(compress: Compress) -> None:
    """A step has one short reduce-scatter and one all-gather; elements meet where they belong."""
    hub = FakeHub(3, name=lambda buffer: f" {buffer.numel()} ")

    def rank(world: World) -> Tensor:
        model = nn.Linear(30, 30, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = wrap(model, world, compress=compress, density=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (model.weight * torch.arange(900.0).view(30, 30)).sum().backward()
            averaged = optimizer.gradients()["weight"].flatten()
            optimizer.step()
        optimizer.synchronize()
        world.leave()
        return averaged

    for averaged in run_ranks(3, rank, hub=hub):
        places = averaged.nonzero().view(-1)
        assert 0 < len(places) <= 90
        turns = averaged[places] / places  # all ranks' parts add up, those of past steps as well
        assert torch.equal(turns, turns.round()) and bool(((turns >= 1) & (turns <= 3)).all())
    shown = hub.picture(0).split()
    sizes = [int(shown[place + 1]) for place, what in enumerate(shown) if what == "RS"]
    assert sizes[:3] == [90] * 3 and "EX" not in shown


@pytest.mark.parametrize("compress", ["int8", "int4"])
def test_a_sum_is_off_by_half_a_step_of_each_rank_or_a_whole_one_by_chance(
    compress: Compress,
) -> None:
    most, block, share = (127, 256, 0.5) if compress == "int8" else (7, 64, 1.0)

    def gradient_of(rank: int) -> Tensor:
        return torch.randn(40, 75, generator=torch.Generator().manual_seed(rank))

    def rank(world: World) -> Tensor:
        model = nn.Linear(75, 40, bias=False)
        optimizer = wrap(model, world, compress=compress)
        (model.weight * gradient_of(world.rank)).sum().backward()
        averaged = optimizer.gradients()["weight"].flatten()
        optimizer.step()
        optimizer.close()
        return averaged

    parts = [gradient_of(number).flatten().view(3, -1) for number in range(3)]
    expected = torch.stack(parts).sum(0) / 3
    bound = torch.zeros_like(expected)
    for number, part in enumerate(parts):
        for owner in range(3):
            if owner != number:  # an owner's own part is added as it is
                blocks = part[owner].split(block)
                largest = [one.abs().max().expand_as(one) for one in blocks]
                bound[owner] += torch.cat(largest) / most * (1 + 2**-7) * share
    for averaged in run_ranks(3, rank):
        off = (averaged.view(3, -1) - expected).abs()
        assert bool((off <= bound / 3 + 1e-6).all()) and off.max() > 1e-3


@pytest.mark.parametrize("way", ["on one rank", "on all ranks"])
@pytest.mark.parametrize("codec", CODECS, ids=lambda one: " ".join(map(str, one.values())))
def test_gradients_of_zero_move_nothing_and_hang_nobody(codec: dict[str, Any], way: str) -> None:
    def rank(world: World) -> Tensor:
        model = nn.Linear(64, 60, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = wrap(model, world, **codec)
        factor = float(way == "on one rank" and world.rank == 0)
        for _ in range(4):
            optimizer.zero_grad()
            (model.weight.sum() * factor).backward()
            optimizer.step()
        optimizer.close()
        return model.weight.detach()

    first, second = run_ranks(2, rank)
    assert torch.equal(first, second)
    assert bool((first < 0).any()) == (way == "on one rank") and bool((first <= 1e-9).all())


@pytest.mark.parametrize("feedback", ["ef14", "ef21", "none"])
def test_a_biased_codec_comes_to_the_optimum_with_error_feedback_alone(feedback: str) -> None:
    """Ranks with other aims, whose mean is the optimum. What a rank sends is its own largest."""
    aims = torch.randn(2, 400, generator=torch.Generator().manual_seed(0))
    aims[1] *= 3.0

    def rank(world: World) -> float:
        model = nn.Linear(400, 1, bias=False)
        nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=0.02)
        settings: dict[str, Any] = {"density": 0.1, "error_feedback": feedback}
        optimizer = DistributedOptimizer(inner, model, world=world, compress="topk", **settings)
        off = []
        for step in range(300):
            optimizer.zero_grad()
            (0.5 * (model.weight - aims[world.rank]).square().sum()).backward()
            optimizer.step()
            if step >= 250:
                off.append((model.weight.detach() - aims.mean(0)).square().mean().sqrt())
        optimizer.close()
        return float(torch.stack(off).mean())

    for off in run_ranks(2, rank):
        assert (off < 0.1) if feedback != "none" else (off > 0.3)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"compress": "topk"}, 1),
        ({"compress": "random-block", "density": 0.2}, 1),
        ({"compress": "random-k"}, 0),
        ({"compress": "block-topk", "density": 1.0}, 0),
    ],
)
def test_rank_0_warns_once_of_a_biased_codec_without_error_feedback(
    settings: dict[str, Any], told: int
) -> None:
    def rank(world: World) -> None:
        wrap(make_wide_model(), world, error_feedback="none", **settings).close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(3, rank)
        run_ranks(1, rank)  # sends nothing
    found = [str(one.message) for one in caught if "error_feedback 'none'" in str(one.message)]
    assert len(found) == told
    share = 100 - 100 * settings.get("density", 0.01)
    assert all(f"drops {share:g} % of each gradient" in line for line in found)
