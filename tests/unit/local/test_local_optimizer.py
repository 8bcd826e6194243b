"""Local steps: what is refused, saved, resumed, shown and exchanged in fewer bits."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dearmpi
from dearmpi import DistributedOptimizer, EngineConfig, LocalOptimizer
from dearmpi.comm.world import World
from dearmpi.engine.bucket import bucket
from dearmpi.errors import (
    CheckpointError,
    MismatchError,
    NonFiniteLossError,
    UsageError,
)
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.mpi.local_steps import SMALL, Case, adamw, backward, sgd, simulate, steps_of
from tests.mpi.models import build_model
from tests.mpi.oracle import assert_equal_on_all_ranks, copies

STREAMING = Case(sync_every=9, fragments=3, delay=2, mix=0.5)


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_streaming_diloco_equals_one_process(size: int) -> None:
    def train(world: World) -> tuple[dict[str, Any], tuple[tuple[str, ...], ...]]:
        model = build_model("dense")
        optimizer = STREAMING.optimizer(model, world)
        steps_of(model, optimizer, range(24))
        optimizer.synchronize()
        found = copies(model)
        optimizer.close()
        return found, optimizer.fragments

    results = run_ranks(size, train)
    ranks, _ = simulate(STREAMING, results[0][1], size=size, num_steps=24)
    for (found, _), expected in zip(results, ranks, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def test_one_rank_that_averages_is_plain_torch_bit_for_bit() -> None:
    def train(world: World) -> None:
        local, plain = build_model("dense"), build_model("dense")
        optimizer = LocalOptimizer.average(sgd(local.parameters()), local, world=world)
        alone = sgd(plain.parameters())
        steps_of(local, optimizer, range(20))
        for step in range(20):
            backward(plain, step, 0)
            alone.step()
        for name, value in plain.state_dict().items():
            assert torch.equal(local.state_dict()[name], value), name

    run_ranks(1, train)


@pytest.fixture
def _small_buckets_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bucket, "_LEAST_COMPRESSED", 1)
    yield


@pytest.mark.usefixtures("_small_buckets_count")
@pytest.mark.parametrize("compress", ["int8", "int4"])
def test_compressed_deltas_leave_equal_anchors_near_the_exact_one(compress: str) -> None:
    def train(world: World, how: str) -> dict[str, Any]:
        model = build_model("single")
        optimizer = STREAMING.optimizer(model, world, compress=how)
        steps_of(model, optimizer, range(30))
        with optimizer.at_anchor():
            shared = copies(model)
        assert_equal_on_all_ranks(shared, world)
        optimizer.close()
        return shared

    exact, lossy = (run_ranks(2, partial(train, how=how))[0] for how in ("none", compress))
    start = build_model("single").state_dict()
    moved = sum(float((exact[name] - start[name]).norm()) for name in exact)
    off = sum(float((exact[name] - lossy[name]).norm()) for name in exact)
    assert 0 < off < 0.5 * moved


@pytest.mark.usefixtures("_small_buckets_count")
@pytest.mark.parametrize(
    ("stop", "compress"),
    [(8, "none"), (12, "none"), (13, "none"), (20, "none"), (10, "int8"), (13, "int4")],
)
def test_a_resumed_run_goes_on_bit_for_bit(stop: int, compress: str) -> None:
    def train(world: World) -> None:
        whole, parted = build_model("single"), build_model("single")
        optimizer = STREAMING.optimizer(whole, world, compress=compress)
        steps_of(whole, optimizer, range(30))
        optimizer.close()
        first = STREAMING.optimizer(parted, world, compress=compress)
        steps_of(parted, first, range(stop))
        state = copy.deepcopy(first.state_dict())
        first.close()
        resumed = build_model("single")
        second = STREAMING.optimizer(resumed, world, compress=compress)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second.load_state_dict(state)
        steps_of(resumed, second, range(stop, 30))
        second.close()
        for name, value in whole.state_dict().items():
            assert torch.equal(resumed.state_dict()[name], value), name

    run_ranks(2, train)


def test_other_numbers_of_ranks_go_on_from_the_shared_values() -> None:
    def save(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
        model = build_model("dense")
        optimizer = STREAMING.optimizer(model, world)
        steps_of(model, optimizer, range(14))
        with optimizer.at_anchor():
            shared = copies(model)
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.close()
        return state, shared

    (state, shared), _ = run_ranks(2, save)

    def resume(world: World) -> None:
        model = build_model("dense")
        optimizer = STREAMING.optimizer(model, world)
        optimizer.load_state_dict(copy.deepcopy(state))
        for name, value in shared.items():
            assert torch.equal(model.state_dict()[name], value), name
        assert optimizer.num_steps == 14
        steps_of(model, optimizer, range(14, 24))
        optimizer.close()

    with pytest.warns(UserWarning, match="rank 0 of 2 .* 3 ranks"):
        run_ranks(3, resume)


def test_the_same_file_on_all_ranks_is_told() -> None:
    def train(world: World) -> None:
        model = build_model("dense")
        optimizer = STREAMING.optimizer(model, world)
        steps_of(model, optimizer, range(5))
        state = world.broadcast_object(optimizer.state_dict())
        optimizer.load_state_dict(state)
        assert_equal_on_all_ranks(copies(model), world)
        optimizer.close()

    with pytest.warns(UserWarning, match="rank 0 of 2"):
        run_ranks(2, train)


def test_gradients_are_averaged_until_sync_after() -> None:
    def train(world: World) -> None:
        local, dense = build_model("dense"), build_model("dense")
        optimizer = STREAMING.optimizer(local, world, sync_after=5)
        averaged = DistributedOptimizer(
            adamw(dense.parameters()), dense, world=world, gather="gradients"
        )
        for step in range(5):
            assert optimizer.is_dense
            optimizer.zero_grad()
            backward(local, step, world.rank)
            optimizer.step()
            averaged.zero_grad()
            backward(dense, step, world.rank)
            averaged.step()
        assert not optimizer.is_dense
        averaged.close()
        for name, value in dense.state_dict().items():
            assert torch.equal(local.state_dict()[name], value), name
        assert all(optimizer.state[param]["step"] == 5 for param in local.parameters())
        steps_of(local, optimizer, range(5, 8))  # the first exchange is merged later
        plain = adamw(dense.parameters())
        plain.load_state_dict(averaged.state_dict())
        for step in range(5, 8):
            backward(dense, step, world.rank)
            plain.step()
        for name, value in dense.state_dict().items():
            assert torch.equal(local.state_dict()[name], value), name
        with optimizer.at_anchor():
            assert_equal_on_all_ranks(copies(local), world)
        optimizer.close()

    run_ranks(2, train)


def test_a_dense_phase_is_resumed() -> None:
    def train(world: World) -> None:
        whole, resumed = build_model("dense"), build_model("dense")
        first = STREAMING.optimizer(whole, world, sync_after=6)
        second = STREAMING.optimizer(resumed, world, sync_after=6)
        for step in range(4):
            first.zero_grad()
            backward(whole, step, world.rank)
            first.step()
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for step in range(4, 20):
            for model, optimizer in ((whole, first), (resumed, second)):
                optimizer.zero_grad()
                backward(model, step, world.rank)
                optimizer.step()
        for name, value in whole.state_dict().items():
            assert torch.equal(resumed.state_dict()[name], value), name
        first.close()
        second.close()

    run_ranks(2, train)


def test_the_anchor_is_shown_and_taken_away_again() -> None:
    def train(world: World) -> None:
        model = build_model("dense")
        optimizer = Case(sync_every=4, delay=2, mix=0.5).optimizer(model, world)
        start = copies(model)
        steps_of(model, optimizer, range(3))
        own = copies(model)
        with optimizer.at_anchor():
            assert all(torch.equal(start[name], value) for name, value in copies(model).items())
        assert all(torch.equal(own[name], value) for name, value in copies(model).items())
        steps_of(model, optimizer, range(3, 4))
        with optimizer.at_anchor():  # of an exchange that is merged later
            assert not torch.equal(start["scale"], model.state_dict()["scale"])
            assert_equal_on_all_ranks(copies(model), world)
        optimizer.close()

    run_ranks(2, train)


def test_half_precision_is_shared_in_fp32() -> None:
    def train(world: World) -> None:
        model = nn.Linear(6, 4).bfloat16()
        optimizer = LocalOptimizer(
            sgd(model.parameters()), model, sync_every=2, world=world, compress="none"
        )
        for step in range(8):
            data = torch.randn(3, 6, generator=torch.Generator().manual_seed(step + world.rank))
            optimizer.zero_grad()
            model(data.bfloat16()).square().mean().backward()
            optimizer.step()
        assert optimizer.outer.param_groups[0]["params"][0].dtype == torch.float32
        with optimizer.at_anchor():
            assert_equal_on_all_ranks({n: v.float() for n, v in copies(model).items()}, world)
        optimizer.close()

    run_ranks(2, train)


def test_a_scheduler_and_plain_torch_take_the_inner_state() -> None:
    def train(world: World) -> None:
        model = build_model("dense")
        optimizer = STREAMING.optimizer(model, world)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(4):
                steps_of(model, optimizer, range(step, step + 1))
                scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.01)
        adamw(model.parameters()).load_state_dict(optimizer.state_dict())
        optimizer.close()

    run_ranks(2, train)


def test_the_outer_optimizers_state_is_divided_among_ranks() -> None:
    def train(world: World) -> int:
        model = nn.Linear(64, 64)
        optimizer = LocalOptimizer(
            sgd(model.parameters()), model, sync_every=1, world=world, compress="none"
        )
        steps_of_zeros(model, optimizer, 2)
        pieces = optimizer.outer.local_state().pieces
        optimizer.close()
        return sum(piece.tensors["momentum_buffer"].numel() for piece in pieces)

    own = run_ranks(4, train)
    assert sum(own) == 64 * 65
    assert max(own) <= 64 * 65 / 4 + 4


def steps_of_zeros(model: nn.Module, optimizer: LocalOptimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()


def test_running_means_of_batch_normalisation_stay_each_ranks_own() -> None:
    def train(world: World) -> tuple[Any, Any, Any]:
        layer, norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        model = nn.Sequential(layer, norm)
        optimizer = LocalOptimizer.average(
            sgd(model.parameters()), model, sync_every=1, world=world
        )
        data = torch.randn(9, 3, generator=torch.Generator().manual_seed(world.rank)) + world.rank
        expected = copy.deepcopy(model)
        expected(data)
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.close()
        return norm.running_mean, expected[1].running_mean, layer.weight.detach()

    (one, expected, weight), (other, _, other_weight) = run_ranks(2, train)
    assert torch.equal(one, expected) and not torch.equal(one, other)
    assert torch.equal(weight, other_weight)


def test_clipping_is_local() -> None:
    def train(world: World) -> float:
        model = build_model("dense")
        optimizer = STREAMING.optimizer(model, world)
        backward(model, 0, world.rank)
        norm = float(optimizer.clip_grad_norm_(0.1))
        assert float(optimizer.clip_grad_norm_(1.0)) == pytest.approx(0.1, rel=1e-4)
        optimizer.close()
        return norm

    one, other = run_ranks(2, train)
    assert one != other


DEFAULTS = [
    (50, (8, 5, 0.0)),
    (8, (8, 0, 0.0)),
    (3, (3, 0, 0.0)),
    (20, (8, 2, 0.0)),
    (1, (1, 0, 0.0)),
]


@pytest.mark.parametrize(("every", "expected"), DEFAULTS)
def test_defaults_fit_the_steps_between_exchanges(every: int, expected: Any) -> None:
    def build(world: World) -> None:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
        optimizer = LocalOptimizer(
            sgd(model.parameters()),
            model,
            sync_every=every,
            world=world,
            config=EngineConfig(bucket_cap_mb=1e-6),
        )
        schedule = optimizer.exchanges
        assert (schedule.fragments, schedule.delay, optimizer.mix) == expected
        assert optimizer.compress == "int4"
        optimizer.close()

    run_ranks(2, build)


def test_ranks_with_other_settings_are_told() -> None:
    def build(world: World) -> None:
        model = build_model("dense")
        with raises(MismatchError, "ranks-built-differently", "sync_every=4", "sync_every=5"):
            LocalOptimizer(sgd(model.parameters()), model, world=world, sync_every=4 + world.rank)

    run_ranks(2, build)


MISUSES: list[Callable[[Any], Any]] = [
    lambda optimizer: optimizer.step(lambda: 0.0),
    lambda optimizer: optimizer.join(),
    lambda optimizer: optimizer.add_param_group({"params": []}),
    lambda optimizer: optimizer.scale_gradients_(0.5),
    lambda optimizer: _scaled(torch.amp.GradScaler("cpu"), optimizer),
    lambda optimizer: _scaled(dearmpi.GradScaler("cpu"), optimizer),
]


def _scaled(scaler: Any, optimizer: Any) -> None:
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


@pytest.mark.parametrize("misuse", MISUSES)
def test_what_local_steps_do_not_have_is_refused(misuse: Callable[[Any], Any]) -> None:
    def train(world: World) -> None:
        model = build_model("dense")
        optimizer = STREAMING.optimizer(model, world)
        backward(model, 0, world.rank)
        with raises(UsageError, "local-steps-forbid"):
            misuse(optimizer)
        optimizer.close()
        optimizer.close()
        with raises(UsageError, "optimizer-closed"):
            optimizer.step()

    run_ranks(2, train)


NAN_CASES: list[tuple[Case, dict[str, Any]]] = [
    (Case(sync_every=4), {}),
    (STREAMING, {}),
    (Case(sync_every=4), {"compress": "int4"}),
]


@pytest.mark.usefixtures("_small_buckets_count")
@pytest.mark.parametrize(("case", "more"), NAN_CASES, ids=["blocking", "streaming", "int4"])
@pytest.mark.parametrize("size", [1, 3])
def test_numbers_that_are_not_finite_are_found_at_the_exchange(
    case: Case, more: dict[str, Any], size: int
) -> None:
    def train(world: World) -> None:
        model = build_model("dense")
        optimizer = case.optimizer(model, world, **more)
        steps_of(model, optimizer, range(1))
        name = optimizer.fragments[-1][-1]
        if world.rank == size - 1:
            dict(model.named_parameters())[name].data.view(-1)[-1] = float("nan")
        with raises(NonFiniteLossError, "not-finite", f"rank {size - 1} on ", name):
            while optimizer.num_steps < 20:
                for param in model.parameters():
                    param.grad = torch.zeros_like(param)  # of the one number alone
                optimizer.step()
        optimizer.close()
        optimizer.close()

    run_ranks(size, train)


def test_finite_numbers_whose_sum_is_too_large_are_exchanged() -> None:
    """100 changes of 1e37 in fp32, whose largest number is 3.4e38."""

    def train(world: World) -> Tensor:
        model = nn.Linear(100, 1, bias=False)
        nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = LocalOptimizer.average(inner, model, sync_every=1, world=world)
        model.weight.grad = torch.full_like(model.weight, 1e37)
        optimizer.step()
        optimizer.close()
        return model.weight.detach()

    for weight in run_ranks(2, train):
        torch.testing.assert_close(weight, torch.full_like(weight, -1e37))


def test_states_that_do_not_fit_are_refused() -> None:
    def train(world: World) -> None:
        model, other = build_model("dense"), build_model("text")
        optimizer, stranger = (
            Case(sync_every=3).optimizer(one, world, config=SMALL) for one in (model, other)
        )
        steps_of(model, optimizer, range(2))
        with raises(CheckpointError, "state-of-other-model"):
            optimizer.load_state_dict(adamw(model.parameters()).state_dict())
        with raises(CheckpointError, "state-of-other-model"):
            optimizer.load_state_dict(stranger.state_dict())
        state = copy.deepcopy(optimizer.state_dict())
        state["local"]["num_steps"] += world.rank
        with raises(MismatchError, "ranks-loaded-different-states", "step 3", "step 2"):
            optimizer.load_state_dict(state)
        optimizer.close()
        stranger.close()

    run_ranks(2, train)


@pytest.mark.parametrize(("before", "after"), [(6, 0), (0, 6)])
def test_a_state_is_loaded_with_another_dense_phase(before: int, after: int) -> None:
    """Averaged gradients need equal parameters; local steps need the newest anchor."""

    def train(world: World) -> None:
        model, resumed = build_model("dense"), build_model("dense")
        first = Case(inner=sgd).optimizer(model, world, sync_after=before)
        for step in range(4 + (before == 0)):
            first.zero_grad()
            backward(model, step, world.rank)
            first.step()
        with first.at_anchor():
            shared = copies(model)
        second = Case(inner=sgd).optimizer(resumed, world, sync_after=after)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        with second.at_anchor():
            found = copies(resumed)
        assert all(torch.equal(shared[name], value) for name, value in found.items())
        assert_equal_on_all_ranks(found, world)
        first.close()
        second.close()

    run_ranks(2, train)


def test_a_state_that_the_phase_cannot_take_up_is_refused() -> None:
    """Else ranks would train alone in silence, or from states that differ."""

    def train(world: World) -> None:
        model = build_model("dense")
        optimizer = Case(inner=sgd).optimizer(model, world, sync_after=2)
        saved = copy.deepcopy(optimizer.state_dict())
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step, world.rank)
            optimizer.step()
        with raises(CheckpointError, "state-of-other-model", "dense phase", 2):
            optimizer.load_state_dict(saved)
        optimizer.close()
        trained = build_model("dense")
        local = Case(inner=adamw).optimizer(trained, world)
        other = Case(inner=adamw).optimizer(build_model("dense"), world, sync_after=9)
        backward(trained, 0, world.rank)
        local.step()
        with raises(CheckpointError, "state-of-other-model", "sync_after", 9):
            other.load_state_dict(copy.deepcopy(local.state_dict()))
        local.close()
        other.close()

    run_ranks(2, train)


@pytest.mark.parametrize(
    ("model", "config", "progress"),
    [
        ("dense", {}, "poll"),
        ("mixed", {}, "thread"),
        ("image", {"reduce_scatter": "exchange", "bucket_cap_mb": None}, "thread"),
        ("dense", {"gather": "gradients"}, "thread"),
        ("dense", {"schedule": "serial"}, "thread"),
        ("dense", {"schedule": "wfbp", "window": 1}, "thread"),
        ("dense", {"check_every": 1}, "thread"),
    ],
)
def test_exchanges_obey_the_settings_of_the_engine(
    model: str, config: dict[str, Any], progress: Any
) -> None:
    case = replace(STREAMING, model=model)

    def train(world: World) -> tuple[dict[str, Any], tuple[tuple[str, ...], ...]]:
        built = build_model(model)
        optimizer = case.optimizer(built, world, config=replace(SMALL, **config))
        steps_of(built, optimizer, range(24))
        found = copies(built)
        optimizer.close()
        return found, optimizer.fragments

    results = run_ranks(2, train, progress=progress)
    ranks, _ = simulate(case, results[0][1], size=2, num_steps=24)
    for (found, _), expected in zip(results, ranks, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
