"""DEAR_CHECK and check_every: mistakes that would be silent are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dearmpi
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError, MismatchError, UsageError

pytestmark = pytest.mark.ranks(at_least=2)


def distribute(model: nn.Module, world: World, **settings: Any) -> dearmpi.DistributedOptimizer:
    return dearmpi.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, world=world, **settings
    )


def test_a_module_that_reads_a_parameter_under_way_is_named(world: World) -> None:
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    kept = model[1].weight  # a reference that nobody can watch
    reader = nn.Identity()
    reader.register_forward_pre_hook(lambda _, args: (args[0] @ kept,))
    model.add_module("reader", reader)
    optimizer = distribute(model, world, check_every=1000)
    buckets = [update.bucket for update in optimizer._assembly.updates]
    bucket = next(bucket for bucket in buckets if "1.weight" in bucket.plan.names)
    bucket.poison()  # as a step does, before the update
    bucket.pending = True
    with pytest.raises(UsageError, match=r"(?s)module reader .*NaN .* under way .*1\.weight"):
        reader(torch.ones(2, 40))
    bucket.pending = False
    optimizer.close()


def test_replicas_that_drift_apart_are_named_with_both_hashes(world: World) -> None:
    last = nn.Linear(4, 2)
    model = nn.Sequential(nn.Linear(4, 4), last)
    optimizer = distribute(model, world, check_every=2, gather="gradients")
    for step in range(2):
        model(torch.ones(2, 4)).sum().backward()
        if step == 1:
            with torch.no_grad():
                last.bias.add_(float(world.rank))
            with pytest.raises(MismatchError, match=r"after step 2, 1\.bias differs .* rank 0"):
                optimizer.step()
        else:
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


def test_a_senseless_setting_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEAR_CHECK", "often")
    with pytest.raises(ConfigError, match="DEAR_CHECK is 'often'"):
        distribute(nn.Linear(2, 2), world)


def test_ranks_with_other_learning_rates_are_told_so(world: World) -> None:
    model = nn.Linear(4, 2)
    optimizer = distribute(model, world, check_every=1)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + 0.01 * world.rank)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(MismatchError, match="after step 1, .* differs between ranks"):
        optimizer.step()
    optimizer.close()
