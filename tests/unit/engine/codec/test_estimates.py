"""EF21: what owners take for the gradient is what ranks know that they do, whatever happens."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import Compress
from dearmpi.engine.bucket import bucket
from tests.combinations import turns_of
from tests.fakes.ranks import run_ranks
from tests.mpi.oracle import copies, fingerprint
from tests.unit.engine.codec.test_sparse import SPARSE, mean_of, whole_gradients
from tests.unit.engine.test_compress import make_wide_model, regress


@pytest.fixture(autouse=True)
def _small_buckets_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bucket, "_LEAST_COMPRESSED", 1)
    yield


def start(world: World, **settings: Any) -> tuple[nn.Linear, DistributedOptimizer]:
    model = nn.Linear(31, 20, bias=False)
    nn.init.zeros_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    given = {"density": 0.1, "error_feedback": "ef21", **settings}
    return model, DistributedOptimizer(inner, model, world=world, **given)


def backward(model: nn.Linear, optimizer: Any, step: int, rank: int, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    (model.weight * factor * whole_gradients(step, rank)).sum().backward()


def held(optimizer: DistributedOptimizer) -> tuple[Tensor, Tensor]:
    """A rank's own estimate, and what it keeps of its shard as the sum of all ranks'."""
    feedback = optimizer._built.engine.codecs.reduce[0].feedback  # type: ignore[attr-defined]
    optimizer.synchronize()
    return feedback._residual.clone(), feedback._total.clone()


@turns_of(compress=SPARSE, density=[1.0, 0.1, 0.02], size=[2, 3])
def test_owners_have_the_sum_of_all_ranks_estimates(
    compress: Compress, density: float, size: int
) -> None:
    """Whole numbers are exact. With density 1 an estimate is the gradient."""

    def rank(world: World) -> tuple[Tensor, Tensor, Tensor]:
        model, optimizer = start(world, compress=compress, density=density)
        for step in range(9):
            backward(model, optimizer, step, world.rank)
            optimizer.step()
        estimate, total = held(optimizer)
        optimizer.close()
        return estimate, total, model.weight.detach().clone()

    found = run_ranks(size, rank)
    summed = torch.stack([estimate for estimate, _, _ in found]).sum(0).view(size, -1)
    for number, (estimate, total, weight) in enumerate(found):
        assert torch.equal(total, summed[number][: len(total)])  # the last shard is shorter
        whole = whole_gradients(8, number).flatten()
        assert torch.equal(estimate[: len(whole)], whole) == (density == 1.0)
        if density == 1.0:
            expected = sum(-mean_of(range(s, s + 1), size) for s in range(9))
            torch.testing.assert_close(weight, expected, rtol=0, atol=0.1)  # sent in 8 bits


def published_adam(gradients: Any, density: float, lr: float) -> Any:
    """Algorithm 2 of arXiv 2106.05203 with Adam's update in place of the plain one.

    gradients: of each step, rank, shard and element. Each rank sends the largest of each shard.
    """
    _, size, shards, length = gradients.shape
    num = math.ceil(density * length)
    estimates = gradients[0].copy()
    values, first, second = (np.zeros((shards, length)) for _ in range(3))
    for step, given in enumerate(gradients, start=1):
        if step > 1:
            for rank in range(size):
                change = given[rank] - estimates[rank]
                sent = np.argsort(-np.abs(change), axis=1)[:, :num]
                moved = np.take_along_axis(estimates[rank] + change, sent, 1)
                np.put_along_axis(estimates[rank], sent, moved, 1)
        mean = estimates.mean(0)
        first = 0.9 * first + 0.1 * mean
        second = 0.99 * second + 0.01 * mean**2
        scale = np.sqrt(second / (1 - 0.99**step)) + 1e-8
        values = values - lr * first / (1 - 0.9**step) / scale
    return values


@turns_of(density=[0.1, 0.02], size=[2, 5])
def test_adam_takes_the_steps_of_the_published_method(density: float, size: int) -> None:
    drawn = np.random.default_rng(0).normal(size=(40, size, size, 620 // size))
    drawn[10:] *= 5.0  # so that estimates lag behind

    def rank(world: World) -> Tensor:
        model = nn.Linear(31, 20, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        inner = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.99))
        settings: dict[str, Any] = {"density": density, "error_feedback": "ef21"}
        optimizer = DistributedOptimizer(inner, model, world=world, compress="topk", **settings)
        for given in drawn:
            optimizer.zero_grad()
            gradient = torch.from_numpy(given[world.rank]).view_as(model.weight)
            (model.weight * gradient).sum().backward()
            optimizer.step()
        master: Tensor = optimizer.state_dict()["state"][0]["master"]
        optimizer.close()
        return master.flatten()

    expected = torch.from_numpy(published_adam(drawn, density, 0.01)).flatten()
    for found in run_ranks(size, rank):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("compress", SPARSE)
def test_constant_gradients_are_known_whole_in_the_end(compress: Compress) -> None:
    """And cost as much as a part of them; a dense step comes first, and after the state is read."""

    def rank(world: World) -> list[float]:
        model, optimizer = start(world, compress=compress, compress_after=1)
        sent, dense = [], optimizer.traffic.dense / 2
        for step in range(4):
            if step == 3:
                optimizer.state_dict()
            backward(model, optimizer, 0, world.rank)
            norm = float(optimizer.clip_grad_norm_(math.inf))
            assert norm == pytest.approx(float(mean_of(range(1), 2).norm()), rel=1e-5)
            optimizer.step()
            sent.append(optimizer.traffic.reduced / dense)
        optimizer.fuse(0.004)
        assert optimizer.traffic.fallbacks == 2  # those of ``compress_after`` are none
        optimizer.close()
        return sent

    for sent in run_ranks(2, rank):
        assert sent[0] == sent[1] == sent[3] == 1.0 and sent[2] < 0.3


@turns_of(compress=SPARSE, way=["dropped", "dropped twice", "as nan", "clipped"])
def test_what_is_dropped_leaves_no_trace(compress: Compress, way: str) -> None:
    def rank(world: World) -> list[Tensor]:
        found = []
        for drops in (False, True):
            model, optimizer = start(world, compress=compress)
            for step in range(5):
                if drops and step != 2:
                    factor = math.nan if way == "as nan" and world.rank else 1.0
                    for _ in range(2 if way == "dropped twice" else 1):
                        backward(model, optimizer, 99 + step, world.rank, factor)
                    if way == "dropped twice":
                        (model.weight * whole_gradients(98, world.rank)).sum().backward()
                    if way == "clipped":
                        optimizer.clip_grad_norm_(0.1)
                    optimizer.zero_grad()
                backward(model, optimizer, step, world.rank)
                optimizer.step()
            found += [*held(optimizer), model.weight.detach().clone()]
            optimizer.close()
        return found

    for found in run_ranks(2, rank):
        assert all(map(torch.equal, found[:3], found[3:]))


@pytest.mark.parametrize("compress", SPARSE)
def test_after_a_step_with_nan_it_begins_anew(compress: Compress) -> None:
    def rank(world: World) -> tuple[float, Tensor]:
        model, optimizer = start(world, compress=compress)
        backward(model, optimizer, 0, world.rank)
        optimizer.step()
        kept = copy.deepcopy(model.state_dict())
        backward(model, optimizer, 1, world.rank, math.nan if world.rank else 1.0)
        norm = float(optimizer.clip_grad_norm_(1.0))
        optimizer.step()
        model.load_state_dict(kept)
        backward(model, optimizer, 2, world.rank)
        optimizer.step()
        estimate, _ = held(optimizer)
        optimizer.close()
        return norm, estimate

    for number, (norm, estimate) in enumerate(run_ranks(2, rank)):
        assert math.isnan(norm)
        assert torch.equal(estimate, whole_gradients(2, number).flatten())


@turns_of(compress=SPARSE, skips=[False, True])
def test_a_sum_that_overflows_on_one_owner_is_soon_made_anew(
    compress: Compress, skips: bool
) -> None:
    """Each rank's own part of it is finite, so that the other owners cannot know at once."""

    def rank(world: World) -> tuple[list[bool], list[float], Tensor, Tensor]:
        model, optimizer = start(world, compress=compress)
        dense, are_finite, sent = optimizer.traffic.dense / 2, [], []
        for step in range(5):
            kept = copy.deepcopy(model.state_dict())
            optimizer.zero_grad()
            loss = (model.weight * whole_gradients(step, world.rank)).sum()
            if step == 0:
                loss = loss + 3e38 * model.weight[3, 7]
            loss.backward()
            norm = float(optimizer.clip_grad_norm_(math.inf))
            are_finite.append(math.isfinite(norm))
            if step == 0 or are_finite[-1] or not skips:
                optimizer.step()
            optimizer.synchronize()
            if not are_finite[-1]:
                model.load_state_dict(kept)
            sent.append(optimizer.traffic.reduced / dense)
        estimate, total = held(optimizer)
        optimizer.close()
        return are_finite, sent, estimate, total

    found = run_ranks(2, rank)
    summed = torch.stack([estimate for _, _, estimate, _ in found]).sum(0).view(2, -1)
    for number, (are_finite, sent, _, total) in enumerate(found):
        assert are_finite == [False, False, True, True, True]
        assert sent[0] == sent[2] == 1.0 and max(sent[1], sent[3], sent[4]) < 0.3
        assert torch.equal(total, summed[number][: len(total)])


@pytest.mark.parametrize("compress", SPARSE)
def test_what_no_rank_uses_stays_and_is_not_owed(compress: Compress) -> None:
    def rank(world: World) -> tuple[float, Tensor, Any]:
        model = nn.ParameterDict(
            {n: nn.Parameter(torch.zeros(20, 31)) for n in ("often", "seldom")}
        )
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        settings: dict[str, Any] = {"compress": compress, "error_feedback": "ef21"}
        optimizer = DistributedOptimizer(inner, model, world=world, bucket_cap_mb=1.0, **settings)
        gradient = whole_gradients(0, world.rank)
        (1000.0 * model["seldom"] * gradient + model["often"] * gradient).sum().backward()
        optimizer.step()
        optimizer.synchronize()
        before = model["seldom"].detach().clone()
        optimizer.zero_grad()
        (model["often"] * gradient).sum().backward()
        norm = float(optimizer.clip_grad_norm_(1e6))
        optimizer.step()
        state = optimizer.state_dict()["state"]
        optimizer.close()
        return norm, model["seldom"].detach() - before, state[1].get("owed", torch.zeros(1))

    for norm, moved, owed in run_ranks(2, rank):
        assert norm == pytest.approx(float(mean_of(range(1), 2).norm()), rel=1e-5)
        assert not bool(moved.any()) and not bool(owed.any())


@turns_of(compress=SPARSE, inner=["adam", "sgd"], moves=[0, 1])
def test_any_optimizer_learns_and_replicas_stay_equal(
    compress: Compress, inner: str, moves: int
) -> None:
    """An estimate is late, so that rates must be lower than with whole gradients."""

    def rank(world: World) -> tuple[str, list[float]]:
        ends = []
        choices: list[dict[str, Any]] = [
            {},
            {"compress": compress, "density": 0.3, "error_feedback": "ef21"},
        ]
        for settings in choices:
            model = make_wide_model()
            plain: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
            if inner == "sgd":
                plain = torch.optim.SGD(model.parameters(), lr=0.01)
            optimizer = DistributedOptimizer(plain, model, world=world, check_every=1, **settings)
            losses = regress(model, optimizer, world, steps=25)
            if moves:
                optimizer.fuse(0.004)
            losses += regress(model, optimizer, world, steps=25)
            optimizer.close()
            ends.append(sum(losses[-5:]) / 5)
        return fingerprint(copies(model)), ends

    found = run_ranks(2, rank)
    assert found[0][0] == found[1][0]
    dense, sparse = (sum(ends) for ends in zip(*(ends for _, ends in found), strict=True))
    assert sparse < 1.5 * dense + 0.1
