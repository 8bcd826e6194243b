"""Compression: equal replicas, nothing lost, and what is saved, resumed and refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer, EngineConfig
from dearmpi.comm.world import World
from dearmpi.config import Compress, Gather, ScheduleName
from dearmpi.engine.bucket import bucket
from dearmpi.engine.codec import quantized
from dearmpi.engine.codec.quantized import quantizer_of
from dearmpi.errors import CheckpointError, ConfigError
from tests.codes import raises
from tests.combinations import turns_of
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill
from tests.mpi.oracle import copies
from tests.unit.engine.parts import distribute, make_model, masters_of, resume, train

FORMATS = ["int8", "int4"]


@pytest.fixture(autouse=True)
def _small_buckets_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bucket, "_LEAST_COMPRESSED", 1)
    yield


def make_wide_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 1))
    fill(model)
    return model


PLANE = torch.linspace(-1.0, 1.0, 40)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """How far ``model`` is from a plane, on the rank's own batch of the step."""
    data = torch.randn(16, 40, generator=torch.Generator().manual_seed(9 * step + rank))
    loss: Tensor = (model(data)[:, 0] - data @ PLANE / 4).square().mean()
    return loss


def regress(model: nn.Module, optimizer: Any, world: World, *, steps: int) -> list[float]:
    """Learn a plane from batches of this rank's own; the losses."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, world.rank)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@turns_of(
    compress=FORMATS,
    gather=["parameters", "gradients"],
    schedule=["dear", "wfbp", "serial"],
    size=[2, 3, 5],
    inner=["adam", "sgd"],
)
def test_replicas_are_equal_and_learn_what_dense_ones_learn(
    compress: Compress, gather: Gather, schedule: ScheduleName, size: int, inner: str
) -> None:
    def rank(world: World) -> tuple[dict[str, Tensor], list[float]]:
        losses = []
        for how in ("none", compress):
            model = make_wide_model()
            optimizer = distribute(
                model,
                world,
                inner=inner,
                gather=gather,
                schedule=schedule,
                compress=how,
                check_every=1,
                bucket_cap_mb=0.004,
            )
            losses.append(sum(regress(model, optimizer, world, steps=40)[-5:]))
            optimizer.close()
        return copies(model), losses

    found = run_ranks(size, rank)
    for other, _ in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0][0].items())
    dense, compressed = (sum(losses) for losses in zip(*(each for _, each in found), strict=True))
    assert compressed == pytest.approx(dense, rel=0.02 if compress == "int8" else 0.25)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("compress", FORMATS)
def test_whole_numbers_are_summed_as_without_compression(
    compress: Compress, gather: Gather
) -> None:
    """Gradients whose blocks reach the largest code are exact, and so are their differences."""
    most = quantizer_of(compress).most

    def rank(world: World) -> list[dict[str, Tensor]]:
        found = []
        for how in (compress, "none"):
            model = nn.Linear(64, 8, bias=False)
            nn.init.zeros_(model.weight)
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=float(world.size)),
                model,
                world=world,
                compress=how,
                gather=gather,
            )
            grads = (torch.arange(512) % (2 * most + 1) - most).view(8, 64).float()
            if gather == "parameters":
                grads /= world.size  # so that the sum of all ranks' is within the codes
            grads[:, 0] = -most / (world.size if gather == "parameters" else 1)
            if gather == "gradients":
                grads *= 1.0 if world.rank == 0 else 0.0
            (model.weight * grads).sum().backward()
            optimizer.step()
            optimizer.close()
            found.append(copies(model))
        return found

    for compressed, dense in run_ranks(2, rank):
        assert torch.equal(compressed["weight"], dense["weight"])
        assert compressed["weight"].abs().max() >= most / 2


@pytest.mark.parametrize("compress", FORMATS)
def test_what_is_not_sent_is_sent_later(compress: Compress) -> None:
    """Replicas are off by less than a step of the codes, and not at all once nothing changes."""

    def rank(world: World) -> list[float]:
        model = make_wide_model()
        optimizer = distribute(model, world, compress=compress, inner="plain", bucket_cap_mb=1.0)
        regress(model, optimizer, world, steps=5)
        off = []
        for _ in range(8):
            state = optimizer.state_dict()["state"]
            masters = [entries["master"] for _, entries in sorted(state.items())]
            pairs = zip(masters, copies(model).values(), strict=True)
            off.append(max((m - shown).abs().max().item() for m, shown in pairs))
            optimizer.zero_grad()
            (0.0 * sum(param.sum() for param in model.parameters())).backward()  # type: ignore[union-attr]
            optimizer.step()
        optimizer.close()
        return off

    # The scale, of 8 bits, is that of the largest difference, or a little more.
    half_a_step = 0.5 / quantizer_of(compress).most * (1 + 2**-7)
    for off in run_ranks(3, rank):
        assert 0 < off[0] < 0.02 and off[-1] < 1e-7
        for now, later in pairwise(off):
            assert later <= half_a_step * now + 1e-7  # and the rounding of parameters
        assert off[3 if compress == "int8" else 6] < 1e-7, "at rest"


@turns_of(gather=["parameters", "gradients"], inner=["adam", "plain", "sgd"], compress=FORMATS)
def test_a_resumed_run_goes_on_bit_by_bit(gather: Gather, inner: str, compress: Compress) -> None:
    settings: dict[str, Any] = {"compress": compress, "gather": gather, "inner": inner}
    whole = run_ranks(3, resume(range(7), **settings))
    assert len({digest for _, digest in whole}) == 1
    for middle in (2, 5):
        start = run_ranks(3, resume(range(middle), **settings))[0][0]
        parts = run_ranks(3, resume(range(middle, 7), start, **settings))
        assert {digest for _, digest in parts} == {digest for _, digest in whole}


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {"compress": "int8"}),
        (4, {"compress": "int4"}),
        (2, {}),
        (1, {"compress": "int8"}),
        (2, {"comm_dtype": "bf16"}),
        (2, {"gather": "gradients", "compress": "int8"}),
    ],
)
def test_no_digit_is_lost_at_another_world_size_or_setting(
    size: int, settings: dict[str, Any]
) -> None:
    start = run_ranks(3, resume(range(4), compress="int8"))[0][0]
    exact = masters_of(start)
    assert not all(map(torch.equal, start[0].values(), exact))
    (found, _), *_ = run_ranks(size, resume(range(0), start, **settings))
    if size > 1 and ("comm_dtype" in settings or settings.get("compress") and len(settings) == 1):
        assert all(map(torch.equal, masters_of(found), exact))
    else:
        assert all(map(torch.equal, found[0].values(), exact))
        assert not any({"master", "shown"} & set(entries) for entries in found[1]["state"].values())


@pytest.mark.parametrize("before", [{"comm_dtype": "bf16"}, {"comm_dtype": "fp16"}, {}])
def test_a_run_goes_on_compressed_from_any_other(before: dict[str, Any]) -> None:
    start = run_ranks(2, resume(range(4), **before))[0][0]
    exact = masters_of(start) if before else list(start[0].values())
    (found, _), *_ = run_ranks(3, resume(range(0), start, compress="int8"))
    assert all(map(torch.equal, found[0].values(), start[0].values()))
    if before:
        assert all(map(torch.equal, masters_of(found), exact))
    (later, _), *_ = run_ranks(3, resume(range(4, 6), start, compress="int8"))
    (dense, _), *_ = run_ranks(3, resume(range(4, 6), (dict(zip(start[0], exact)), start[1])))  # noqa: B905
    for one, other in zip(later[0].values(), dense[0].values(), strict=True):
        assert torch.allclose(one, other, atol=0.01)


def test_masters_and_what_is_shown_outlive_a_new_layout() -> None:
    def rank(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
        model = make_model()
        optimizer = distribute(model, world, compress="int8")
        train(model, optimizer, range(4), world)
        before = copy.deepcopy(optimizer.state_dict()["state"])
        optimizer.fuse(1.0)
        after = copy.deepcopy(optimizer.state_dict()["state"])
        train(model, optimizer, range(4, 6), world)
        optimizer.close()
        return before, after

    for before, after in run_ranks(2, rank):
        for number, entries in before.items():
            assert torch.equal(entries["master"], after[number]["master"])
            assert torch.equal(entries["shown"], after[number]["shown"])


@pytest.mark.parametrize("reload", [False, True])
def test_parameters_that_a_script_changes_count_more_than_masters(reload: bool) -> None:
    def rank(world: World) -> dict[str, Tensor]:
        model = make_model()
        optimizer = distribute(model, world, compress="int8", inner="plain")
        train(model, optimizer, range(4), world)
        optimizer.synchronize()
        saved = copy.deepcopy(optimizer.state_dict())
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(3.0)
        if reload:  # the state of before, to a model that is another one by now
            optimizer.load_state_dict(saved)
        optimizer.zero_grad()
        (0.0 * sum(param.sum() for param in model.parameters())).backward()  # type: ignore[union-attr]
        optimizer.step()
        return copies(model)

    for found in run_ranks(2, rank):
        assert all(bool((value == 3.0).all()) for value in found.values())


@pytest.mark.parametrize("compress", FORMATS)
def test_what_travels_is_what_the_codecs_say(compress: Compress) -> None:
    sizes: set[int] = set()

    def seconds(label: str, sent: int) -> float:
        if label[:2] in ("EX", "AG", "RS"):
            sizes.add(sent)
        return 0.0

    def rank(world: World) -> Any:
        model = make_wide_model()
        optimizer = distribute(model, world, compress=compress, bucket_cap_mb=1.0)
        regress(model, optimizer, world, steps=3)
        traffic = optimizer.traffic
        optimizer.close()
        assert optimizer.traffic.dense == 0
        return traffic

    traffic = run_ranks(4, rank, hub=FakeHub(4, seconds=seconds))[0]
    numel = sum(param.numel() for param in make_wide_model().parameters())
    assert traffic.dense == 2 * 3 * -(-numel // 4) * 4
    assert traffic.reduced == traffic.gathered == sizes.pop() // 4 * 3 and not sizes
    assert traffic.dense > (3 if compress == "int8" else 5) * (traffic.reduced + traffic.gathered)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_operations_start_in_one_order_however_long_encoding_takes(
    gather: Gather, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collectives of two buckets in flight are told apart by their order alone."""
    monkeypatch.setattr(quantized, "_PIECE", 256)
    monkeypatch.setattr(quantized, "_PIECES_A_STEP", 1)

    def rank(world: World) -> dict[str, Tensor]:
        sizes = [40, 300, 10, 200, 4, 120, 1]
        model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
        fill(model)
        settings: dict[str, Any] = {"gather": gather, "window": 3, "bucket_cap_mb": 1e-4}
        optimizer = distribute(model, world, compress="int8", **settings)
        regress(model, optimizer, world, steps=3)
        optimizer.close()
        return copies(model)

    hub = FakeHub(3)
    first, *others = run_ranks(3, rank, hub=hub)
    picture = [hub.picture(rank) for rank in range(3)]
    assert "EX" in picture[0]
    for other in others:
        assert all(torch.equal(other[name], value) for name, value in first.items())
    by_lane = [[[e for e in p.split() if e[:2] == lane] for lane in ("EX", "AG")] for p in picture]
    assert by_lane[0] == by_lane[1] == by_lane[2]


@pytest.mark.parametrize("compress", FORMATS)
@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_a_gradient_that_is_not_finite_on_one_rank_is_seen_by_all(
    compress: Compress, gather: Gather
) -> None:
    def rank(world: World) -> float:
        model = make_wide_model()
        optimizer = distribute(model, world, compress=compress, gather=gather)
        factor = float("nan") if world.rank == 1 else 1.0
        (factor * model(torch.ones(2, 40)).sum()).backward()
        norm = float(optimizer.clip_grad_norm_(1.0))
        optimizer.close()
        return norm

    assert all(norm != norm for norm in run_ranks(3, rank))


def test_small_buckets_and_one_rank_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (run_ranks(1, resume(range(5), compress=how))[0][1] for how in ("none", "int4"))
    assert one == other
    monkeypatch.setattr(bucket, "_LEAST_COMPRESSED", 1 << 16)
    one, other = (run_ranks(2, resume(range(5), compress=how))[0][1] for how in ("none", "int4"))
    assert one == other


def test_one_rank_with_masters_compresses_nothing() -> None:
    def rank(world: World) -> list[dict[str, Tensor]]:
        found = []
        for compress in ("none", "int4"):
            model = make_wide_model()
            model[0].bfloat16()  # type: ignore[index]
            model[0].register_forward_pre_hook(lambda _, given: (given[0].bfloat16(),))  # type: ignore[index]
            model[0].register_forward_hook(lambda *given: given[-1].float())  # type: ignore[index]
            optimizer = distribute(model, world, compress=compress, master_weights=True)
            regress(model, optimizer, world, steps=3)
            optimizer.close()
            found.append(copies(model))
        return found

    ((dense, compressed),) = run_ranks(1, rank)
    assert all(torch.equal(compressed[name], value) for name, value in dense.items())


def test_a_bucket_may_become_too_small_to_compress_and_large_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bucket, "_LEAST_COMPRESSED", 100)

    def rank(world: World) -> tuple[list[set[int]], dict[str, Tensor], dict[str, Tensor]]:
        kept, found = [], []
        for compress in ("int8", "none"):
            model = make_wide_model()
            settings: dict[str, Any] = {"compress": compress, "check_every": 1}
            optimizer = distribute(model, world, inner="sgd", **settings)
            for cap in (1.0, 1e-4, 1.0):
                optimizer.fuse(cap)
                regress(model, optimizer, world, steps=3)
                state = optimizer.state_dict()["state"]
                kept.append({number for number, entries in state.items() if "master" in entries})
                assert all(("master" in one) == ("shown" in one) for one in state.values())
            optimizer.close()
            found.append(copies(model))
        return kept, found[0], found[1]

    first, *others = run_ranks(3, rank)
    assert first[0] == [{0, 1, 2, 3}, {0}, {0, 1, 2, 3}, set(), set(), set()]
    for kept, compressed, _ in others:
        assert kept == first[0]
        assert all(torch.equal(compressed[name], value) for name, value in first[1].items())
    for name, value in first[2].items():
        assert torch.allclose(first[1][name], value, atol=0.02)


@turns_of(compress=["int8", "topk"], shards=["even", "whole"], freezes=[False, True], size=[2, 3])
def test_a_bucket_that_becomes_too_small_to_compress_loses_no_digit(
    compress: Compress, shards: Any, freezes: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of what takes no step for a while, nor where the state is read or moves on meanwhile."""
    if compress == "topk":
        shards = "even"
    monkeypatch.setattr(bucket, "_LEAST_COMPRESSED", 100)

    def rank(world: World) -> tuple[list[Tensor], list[list[Tensor]], dict[str, Tensor]]:
        model = make_wide_model()
        optimizer = distribute(model, world, compress=compress, shards=shards, inner="plain")
        weights = model[0].weight, model[2].weight  # type: ignore[index]
        optimizer.fuse(1.0)
        regress(model, optimizer, world, steps=3)
        state = optimizer.state_dict()["state"]
        masters = [entries["master"].clone() for entries in state.values()]
        for entries, master in zip(state.values(), masters, strict=True):
            master -= 0.05 * entries.get("owed", torch.zeros(1))
        weights[1].requires_grad_(not freezes)
        found = []
        for cap in (1e-4, 1e-3, 1e-4):
            optimizer.fuse(cap)
            kept = optimizer.state_dict()["state"].values()
            found.append([e["master"] for e in kept if "master" in e])
        weights[1].requires_grad_(True)
        optimizer.zero_grad()
        (0.0 * sum(param.sum() for param in model.parameters())).backward()  # type: ignore[union-attr]
        optimizer.step()
        shown = copies(model)
        optimizer.close()
        return masters, found, shown

    for masters, found, shown in run_ranks(size, rank):
        for kept in found:
            assert len(kept) == len(masters)
        for master, name in zip(masters[1:], list(shown)[1:], strict=True):
            torch.testing.assert_close(shown[name], master, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "settings", [{"comm_dtype": "bf16"}, {"reduce_scatter": "native"}, {"update_on": "host"}]
)
def test_settings_that_contradict_compression_are_refused(settings: dict[str, Any]) -> None:
    (name,) = settings
    with raises(ConfigError, "settings-contradict", "'int8'", name):
        EngineConfig(compress="int8", **settings)
    with raises(ConfigError, "unknown-choice", "int8", "int4"):
        EngineConfig(compress="int6")  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", ["master", "shown"])
def test_a_copy_of_another_model_is_refused(entry: str) -> None:
    start = run_ranks(2, resume(range(4), compress="int8"))[0][0]
    start[1]["state"][0][entry] = torch.zeros(2)

    def rank(world: World) -> str:
        optimizer = distribute(make_model(), world, compress="int8")
        with pytest.raises(CheckpointError) as caught:
            optimizer.load_state_dict(start[1])
        return str(caught.value)

    for message in run_ranks(2, rank):
        assert "master copy of parameter" in message and "(2,)" in message
