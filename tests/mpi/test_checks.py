"""DEAR_CHECK and check_every: mistakes that would be silent are named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dearmpi
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError, MismatchError, UsageError
from tests.codes import raises
from tests.mpi.models import NUM_FEATURES, build_model

pytestmark = pytest.mark.ranks(at_least=2)


def distribute(model: nn.Module, world: World, **settings: Any) -> dearmpi.DistributedOptimizer:
    return dearmpi.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, world=world, **settings
    )


def fake_forward(module: nn.Module, data: Tensor) -> object:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return module(mode.from_tensor(data))


@pytest.mark.parametrize(
    ("forward", "has_values"),
    [
        (lambda module, data: module(data), True),
        (lambda module, data: torch.vmap(module)(data), True),
        (lambda module, data: torch.func.jacrev(torch.vmap(module))(data), True),
        (fake_forward, False),
    ],
    ids=["plain", "vmap", "jacrev of vmap", "fake"],
)
def test_a_module_that_reads_a_parameter_under_way_is_named(
    forward: Callable[[nn.Module, Tensor], object], has_values: bool, world: World
) -> None:
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    kept = model[1].weight  # a reference that nobody can watch
    reader = nn.Identity()
    reader.register_forward_pre_hook(lambda _, args: (args[0] @ kept,))
    model.add_module("reader", reader)
    optimizer = distribute(model, world, check_every=1000)
    buckets = [update.bucket for update in optimizer._built.updates.of_buckets]
    bucket = next(bucket for bucket in buckets if "1.weight" in bucket.spec.names)
    bucket.pending = True
    forward(reader, torch.ones(2, 40))
    bucket.fill_nan()  # as a step does, before the update
    found = raises(UsageError, "read-of-stale-parameter", "1.weight")
    with found if has_values else nullcontext():
        forward(reader, torch.ones(2, 40))
    bucket.pending = False
    optimizer.close()


def small_model() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def drift(model: Any, world: World) -> None:
    with torch.no_grad():
        model[1].bias.add_(float(world.rank))


def train_a_step(model: Any, optimizer: dearmpi.DistributedOptimizer) -> None:
    with optimizer.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


BIAS_AFTER_STEP_2 = r"after step 2, 1\.bias differs .* rank 0"


@pytest.mark.parametrize("check_every", [1, 2])
@pytest.mark.parametrize("eager", [False, True])
def test_replicas_that_drift_apart_are_named_with_both_hashes(
    world: World, eager: bool, check_every: int
) -> None:
    model = small_model()
    optimizer = distribute(model, world, check_every=check_every, gather="gradients", eager=eager)
    train_a_step(model, optimizer)
    drift(model, world)
    train_a_step(model, optimizer)
    with pytest.raises(MismatchError, match=BIAS_AFTER_STEP_2):
        train_a_step(model, optimizer)
    optimizer.close()


def test_steps_are_counted_on_where_buckets_change_and_gradients_are_dropped(world: World) -> None:
    model = small_model()
    optimizer = distribute(model, world, check_every=1, gather="gradients")
    train_a_step(model, optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.fuse(1e-6)
    drift(model, world)
    train_a_step(model, optimizer)
    with pytest.raises(MismatchError, match=BIAS_AFTER_STEP_2):
        optimizer.fuse(1.0)
    optimizer.close()


def test_the_last_step_is_compared_at_the_end(world: World) -> None:
    model = small_model()
    model[1].requires_grad_(False)
    optimizer = distribute(model, world, check_every=2)
    for _ in range(2):
        train_a_step(model, optimizer)
        drift(model, world)  # frozen, which no step mends
    with pytest.raises(MismatchError, match=BIAS_AFTER_STEP_2):
        optimizer.close()
    optimizer.close()
    model(torch.ones(2, 4)).sum().backward()  # detached, and in order


def test_ranks_that_wait_in_join_compare_replicas_as_well(world: World) -> None:
    model = small_model()
    optimizer = distribute(model, world, check_every=1, gather="gradients")
    with pytest.raises(MismatchError, match=BIAS_AFTER_STEP_2), optimizer.join():
        for step in range(4 if world.rank else 2):
            model(torch.ones(2, 4)).sum().backward()
            if step == 1:
                drift(model, world)
            optimizer.step()
    optimizer.close()


def test_what_a_script_does_between_two_steps_and_takes_back_is_no_drift(world: World) -> None:
    """As sharpness-aware training does, by each rank's own gradients."""
    model = small_model()
    optimizer = distribute(model, world, check_every=1)
    for _ in range(3):
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        drift(model, world)
        model(torch.ones(2, 4)).square().sum().backward()
        model.load_state_dict(kept)
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("eager", [False, True])
def test_training_under_checks_gives_the_same_numbers(
    world: World, gather: str, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for checks in ("0", "1"):
        monkeypatch.setenv("DEAR_CHECK", checks)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = distribute(model, world, gather=gather, eager=eager, bucket_cap_mb=1e-4)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((3, 6), float(step + world.rank))).square().mean().backward()
            optimizer.step()
        results.append([value.clone() for value in model.state_dict().values()])
        optimizer.close()
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_replicas_with_kernels_in_channels_last_are_compared(world: World, gather: str) -> None:
    model = build_model("image")  # its 1x1 kernels are contiguous, with strides of their own
    optimizer = distribute(model, world, gather=gather, check_every=1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, NUM_FEATURES, dtype=torch.float64), torch.zeros(2)).backward()
        optimizer.step()
    optimizer.close()


def test_a_senseless_setting_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEAR_CHECK", "often")
    with raises(ConfigError, "wrong-type", "DEAR_CHECK", "'often'"):
        distribute(nn.Linear(2, 2), world)


def test_ranks_with_other_options_are_told_so(world: World) -> None:
    """Than learning rates, which are told in every step."""
    model = nn.Linear(4, 2)
    optimizer = distribute(model, world, check_every=1)
    optimizer.param_groups[0]["weight_decay"] = 0.1 * (1 + 0.01 * world.rank)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with raises(MismatchError, "replicas-differ", "step 1"):
        optimizer.close()
    optimizer.close()
