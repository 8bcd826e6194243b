"""PowerSGD: factors against a model in numpy, and nothing lost wherever training is interrupted."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer, EngineConfig
from dearmpi.comm.world import World
from dearmpi.engine.bucket import bucket
from dearmpi.engine.codec import powersgd
from dearmpi.errors import ConfigError
from tests.codes import raises
from tests.combinations import turns_of
from tests.fakes.ranks import run_ranks

POWER: dict[str, Any] = {"compress": "powersgd", "gather": "gradients", "powersgd_rank": 2}
ROWS, COLUMNS = 12, 31


@pytest.fixture(autouse=True)
def _small_buckets_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bucket, "_LEAST_COMPRESSED", 1)
    yield


def gradient_of(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)


def mean_of(steps: range, size: int) -> Tensor:
    """The sum over steps of what ranks have in the mean."""
    parts = [gradient_of(step, rank) for step in steps for rank in range(size)]
    return torch.stack(parts).sum(0) / size


class Layer(nn.Module):
    """A matrix that travels as factors, and a vector that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(5, dtype=torch.float64))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum() + (self.bias * gradient[0, :5]).sum()


def start(world: World, **settings: Any) -> tuple[Layer, DistributedOptimizer]:
    model = Layer()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, DistributedOptimizer(inner, model, world=world, **{**POWER, **settings})


def take_step(world: World, model: Layer, optimizer: DistributedOptimizer, step: int) -> None:
    optimizer.zero_grad()
    model(gradient_of(step, world.rank)).backward()
    optimizer.step()


def train(world: World, steps: range, start_from: Any = None, **settings: Any) -> Any:
    """SGD on gradients that do not depend on parameters; what would be saved."""
    model, optimizer = start(world, **settings)
    if start_from is not None:
        model.load_state_dict(start_from[0])
        optimizer.load_state_dict(copy.deepcopy(start_from[1]))
    for step in steps:
        take_step(world, model, optimizer, step)
    state = copy.deepcopy(optimizer.state_dict())
    found = copy.deepcopy(model.state_dict()), state
    optimizer.close()
    return found


def owed_and_done(found: Any) -> Tensor:
    """All that the matrix's gradients have led to, and will."""
    done: Tensor = found[1]["state"][0]["owed"] - found[0]["weight"]
    return done


def orthonormal(rows: Any) -> Any:
    """By numpy's QR, whose vectors may have the other sign."""
    return np.linalg.qr(rows.T)[0].T


def numpy_weights(size: int, num_steps: int, first: Any) -> Any:
    """What one process makes of the same gradients; ``first``: the basis of the first step."""
    weight = np.zeros((ROWS, COLUMNS))
    owed = [np.zeros_like(weight) for _ in range(size)]
    basis, turned = first, False
    for step in range(num_steps):
        given = [gradient_of(step, rank).numpy() + owed[rank] for rank in range(size)]
        parts = [basis @ (one.T if turned else one) for one in given]
        made = [(part.T @ basis if turned else basis.T @ part) for part in parts]
        owed = [one - own for one, own in zip(given, made, strict=True)]
        weight -= sum(made) / size
        basis, turned = orthonormal(sum(parts) / size), not turned
    return weight


@turns_of(size=[2, 3, 4], steps=[1, 2, 7], schedule=["dear", "wfbp", "serial"])
def test_factors_are_those_of_a_model_in_numpy(size: int, steps: int, schedule: Any) -> None:
    found = run_ranks(size, lambda world: train(world, range(steps), schedule=schedule))
    drawn = torch.randn(
        2, ROWS, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).numpy()
    expected = numpy_weights(size, steps, orthonormal(drawn))
    for model, _ in found:
        np.testing.assert_allclose(model["weight"].numpy(), expected, rtol=0, atol=1e-10)
        assert torch.equal(model["weight"], found[0][0]["weight"])
        bias = -sum(gradient_of(s, r)[0, :5] for s in range(steps) for r in range(size)) / size
        torch.testing.assert_close(model["bias"], bias, rtol=0, atol=1e-12)


@turns_of(size=[2, 3], rank=[1, 2, 5], steps=[1, 4, 20])
def test_no_part_of_a_gradient_is_lost(size: int, rank: int, steps: int) -> None:
    found = run_ranks(size, lambda world: train(world, range(steps), powersgd_rank=rank))
    for one in found:
        torch.testing.assert_close(
            owed_and_done(one), mean_of(range(steps), size), rtol=0, atol=1e-10
        )
        assert bool(one[1]["state"][0]["owed"].any())


def test_gradients_of_low_rank_come_whole_after_two_steps() -> None:
    def body(world: World) -> Tensor:
        model, optimizer = start(world)
        left = torch.arange(1.0, ROWS + 1, dtype=torch.float64)
        right = torch.arange(1.0, COLUMNS + 1, dtype=torch.float64).cos()
        for _ in range(4):
            optimizer.zero_grad()
            (model.weight * torch.outer(left, right)).sum().backward()
            optimizer.step()
        optimizer.close()
        return model.weight.detach() + 4 * torch.outer(left, right)

    for rest in run_ranks(2, body):
        assert float(rest.abs().max()) < 1e-10


def test_bases_are_orthonormal_whatever_they_are_made_of() -> None:
    repeated = torch.ones(3, 20)
    many = [torch.ones(16, 97), torch.ones(8, 97), torch.arange(8.0)[:, None] * torch.ones(97)]
    tiny = 1e-30 * torch.randn(3, 20)
    for rows in (torch.zeros(3, 20), repeated, torch.randn(3, 20), tiny, *many):
        basis = powersgd._orthonormal(rows)
        torch.testing.assert_close(basis @ basis.t(), torch.eye(len(rows)), rtol=0, atol=1e-6)
        kept = rows @ basis.t() @ basis
        torch.testing.assert_close(kept, rows, rtol=1e-5, atol=1e-35)


@pytest.mark.parametrize("size", [2, 3])
def test_a_resumed_run_goes_on_bit_by_bit(size: int) -> None:
    def whole(world: World) -> Any:
        model, optimizer = start(world)
        for step in range(3):
            take_step(world, model, optimizer, step)
        saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        for step in range(3, 7):
            take_step(world, model, optimizer, step)
        end = copy.deepcopy(model.state_dict())
        optimizer.close()
        return saved, end

    for rank, (saved, end) in enumerate(run_ranks(size, whole)):
        resume = partial(train, steps=range(3, 7), start_from=saved)
        again = run_ranks(size, resume)[rank][0]
        assert all(torch.equal(again[name], end[name]) for name in end)


def test_a_run_resumed_on_other_ranks_loses_nothing() -> None:
    saved = run_ranks(4, lambda world: train(world, range(3)))[0]
    expected = mean_of(range(3), 4) + mean_of(range(3, 5), 2)
    found = run_ranks(2, lambda world: train(world, range(3, 5), saved))
    for one in found:
        torch.testing.assert_close(owed_and_done(one), expected, rtol=0, atol=1e-10)
    for one in run_ranks(3, lambda world: train(world, range(0), saved)):
        torch.testing.assert_close(
            one[1]["state"][0]["owed"], saved[1]["state"][0]["owed"], rtol=0, atol=0
        )


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_clipping_sees_the_norm_of_what_comes(norm_type: float) -> None:
    def body(world: World) -> tuple[float, float, Tensor]:
        model, optimizer = start(world)
        model(gradient_of(0, world.rank)).backward()
        norm = float(optimizer.clip_grad_norm_(0.5, norm_type))
        found = optimizer.gradients().values()
        after = torch.cat([grad.flatten() for grad in found]).norm(norm_type)
        optimizer.step()
        optimizer.close()
        return norm, float(after), model.weight.detach()

    plain = run_ranks(2, lambda world: train(world, range(1)))[0][0]
    whole = torch.cat([plain["weight"].flatten(), plain["bias"]])
    for norm, after, weight in run_ranks(2, body):
        assert norm == pytest.approx(float(whole.norm(norm_type)), rel=1e-9)
        assert after == pytest.approx(0.5, rel=1e-5)
        torch.testing.assert_close(weight, plain["weight"] * 0.5 / norm, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("reads", [False, True])
def test_a_second_backprop_adds_up(reads: bool) -> None:
    def body(world: World) -> Any:
        model, optimizer = start(world)
        for step in (0, 2):
            optimizer.zero_grad()
            model(gradient_of(step, world.rank)).backward()
            if reads:
                optimizer.gradients()
            model(gradient_of(step + 1, world.rank)).backward()
            optimizer.step()
        found = model.state_dict(), copy.deepcopy(optimizer.state_dict())
        optimizer.close()
        return found

    for one in run_ranks(2, body):
        torch.testing.assert_close(owed_and_done(one), mean_of(range(4), 2), rtol=0, atol=1e-10)


@pytest.mark.parametrize("way", ["dropped", "dropped twice", "unused", "not finite"])
def test_what_does_not_count_changes_nothing_that_is_owed(way: str) -> None:
    def body(world: World) -> Any:
        model, optimizer = start(world)
        take_step(world, model, optimizer, 0)
        optimizer.zero_grad()
        if way.startswith("dropped"):
            model(gradient_of(99, world.rank)).backward()
            if way == "dropped twice":
                model(gradient_of(98, world.rank)).backward()
            optimizer.zero_grad()
        elif way == "unused":
            model.bias.sum().backward()
            optimizer.step()
        take_step(world, model, optimizer, 1)
        if way == "not finite":
            kept = copy.deepcopy(model.state_dict())
            optimizer.zero_grad()
            model(gradient_of(2, world.rank) * (math.nan if world.rank else 1.0)).backward()
            assert not math.isfinite(float(optimizer.clip_grad_norm_(1.0)))
            optimizer.step()
            assert bool(model.weight.isnan().any())
            model.load_state_dict(kept)
            take_step(world, model, optimizer, 3)
            assert bool(model.weight.isfinite().all())
        found = model.state_dict(), copy.deepcopy(optimizer.state_dict())
        optimizer.close()
        return found

    for one in run_ranks(2, body):
        if way != "not finite":
            torch.testing.assert_close(owed_and_done(one), mean_of(range(2), 2), rtol=0, atol=1e-10)


def test_few_bytes_travel() -> None:
    def body(world: World) -> tuple[int, int]:
        model = nn.Linear(512, 512, bias=False)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        settings: dict[str, Any] = {**POWER, "powersgd_rank": 4}
        optimizer = DistributedOptimizer(inner, model, world=world, **settings)
        traffic = optimizer.traffic
        optimizer.close()
        return traffic.reduced, traffic.gathered

    for reduced, gathered in run_ranks(2, body):
        assert reduced == gathered == 4 * 512 * 4 // 2


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"compress": "powersgd"}, "settings-contradict"),
        ({"powersgd_rank": 2}, "setting-without-effect"),
        ({"powersgd_rank": 2, "compress": "int8"}, "setting-without-effect"),
        ({**POWER, "powersgd_rank": 0}, "out-of-range"),
        ({**POWER, "powersgd_rank": 1.5}, "wrong-type"),
        ({**POWER, "comm_dtype": "bf16"}, "settings-contradict"),
        ({**POWER, "density": 0.1}, "setting-without-effect"),
    ],
)
def test_what_means_nothing_is_refused(settings: dict[str, Any], code: str) -> None:
    with raises(ConfigError, code):
        EngineConfig(**settings)


def test_what_has_no_large_matrix_travels_as_it_is() -> None:
    def body(world: World) -> Tensor:
        model = nn.Linear(3, 3, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(inner, model, world=world, **POWER)
        (model.weight.sum() * (1 + world.rank)).backward()
        optimizer.step()
        optimizer.close()
        return model.weight.detach()

    for weight in run_ranks(2, body):
        assert torch.equal(weight, torch.full((3, 3), -1.5, dtype=torch.float64))


def test_what_is_owed_has_its_parameters_order_in_memory() -> None:
    """Channels last: what waits while no rank uses the parameter comes to its own elements."""

    def body(world: World) -> Tensor:
        conv = nn.Conv2d(8, 16, 3, bias=False, dtype=torch.float64)
        other = nn.Linear(2, 2, bias=False, dtype=torch.float64)
        nn.init.zeros_(conv.weight)
        conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model = nn.ModuleList([conv, other])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(inner, model, world=world, **POWER)
        generator = torch.Generator().manual_seed(world.rank)
        gradient = torch.randn(16, 8, 3, 3, generator=generator, dtype=torch.float64)
        ((conv.weight * gradient).sum() + other.weight.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        other.weight.sum().backward()
        optimizer.step()
        state = optimizer.state_dict()["state"][0]
        optimizer.close()
        owed: Tensor = state["owed"] - conv.weight.detach()
        return owed

    gradients = [
        torch.randn(16, 8, 3, 3, generator=torch.Generator().manual_seed(r), dtype=torch.float64)
        for r in range(2)
    ]
    for found in run_ranks(2, body):
        mean = (gradients[0] + gradients[1]) / 2
        torch.testing.assert_close(found, mean, rtol=0, atol=1e-10)


def test_the_last_ranks_shard_may_be_too_short_for_factors() -> None:
    """On 25 ranks the last has one element of the bucket: it travels as it is."""

    def body(world: World) -> Tensor:
        matrix, number = nn.Parameter(torch.zeros(20, 30)), nn.Parameter(torch.zeros(1))
        model = nn.ParameterList([matrix, number])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(inner, model, world=world, **POWER)
        (matrix.sum() + number.sum()).backward()
        optimizer.step()
        optimizer.close()
        return matrix.detach()

    for weight in run_ranks(25, body):
        assert torch.equal(weight, torch.full((20, 30), -1.0))


def test_after_close_the_optimizer_goes_on_without_what_was_owed() -> None:
    def body(world: World) -> None:
        used, unused = nn.Linear(9, 8, bias=False), nn.Linear(9, 8, bias=False)
        model = nn.ModuleList([used, unused])
        inner = torch.optim.Adam(model.parameters())
        optimizer = DistributedOptimizer(inner, model, world=world, **POWER)
        for _ in range(3):
            optimizer.zero_grad()
            (used.weight * torch.randn(8, 9)).sum().backward()
            optimizer.step()
        optimizer.close()
        unused.weight.sum().backward()
        inner.step()
        assert all("owed" not in entries for entries in inner.state.values())

    with pytest.warns(UserWarning, match="had not sent"):
        run_ranks(2, body)


@pytest.mark.parametrize("settings", [POWER, {"compress": "sketch"}], ids=lambda s: s["compress"])
def test_the_state_of_a_parameter_that_never_steps_can_be_loaded(settings: Any) -> None:
    """By torch's Adam too, which looks for its own entries wherever there are any."""

    def rank(world: World) -> dict[str, Any]:
        model = nn.ParameterDict(
            {name: nn.Parameter(torch.zeros(ROWS, COLUMNS)) for name in ("always", "never")}
        )

        def make() -> DistributedOptimizer:
            inner = torch.optim.Adam(model.parameters(), lr=0.1)
            return DistributedOptimizer(inner, model, world=world, bucket_cap_mb=1.0, **settings)

        optimizer = make()
        for step in range(2):
            optimizer.zero_grad()
            (model["always"] * gradient_of(step, world.rank).float()).sum().backward()
            optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.close()
        later = make()
        nothing = {"owed": torch.zeros(ROWS, COLUMNS)}
        later.load_state_dict({**state, "state": {**state["state"], 1: nothing}})
        again = later.state_dict()
        later.close()
        assert set(again["state"]) == set(state["state"]) == {0}
        torch.optim.Adam(model.parameters()).load_state_dict(state)
        return state

    for state in run_ranks(2, rank):
        assert int(state["state"][0]["step"]) == 2
