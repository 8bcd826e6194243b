"""Changes of buckets and parameters that cannot be served are refused, and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import Gather
from dearmpi.errors import ConfigError, UsageError
from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.data.plan import Plan
from dearmpi.plan.data.workload import LayerSpec, Workload
from dearmpi.plan.model.cost import Costs, LinkModel
from dearmpi.plan.model.profile import profile_workload
from dearmpi.plan.search.planner import make_plan
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill


@pytest.mark.parametrize("act", ["fuse", "follow", "close", "add_param_group", "state_dict"])
def test_buckets_stay_inside_join(act: str) -> None:
    """Ranks that have no batches left could not follow."""

    def rank(world: World) -> None:
        model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model[0].parameters(), lr=0.1), model, world=world
        )
        acts: dict[str, Callable[[], object]] = {
            "fuse": lambda: optimizer.fuse(1.0),
            "follow": lambda: optimizer.follow(cast(Plan, None)),
            "close": optimizer.close,
            "state_dict": optimizer.state_dict,
            "add_param_group": lambda: optimizer.add_param_group({"params": [model[1].weight]}),
        }
        with optimizer.join(), raises(UsageError, "join-misused", "inside join"):
            acts[act]()
        assert len(optimizer.param_groups) == 1
        optimizer.close()

    run_ranks(2, rank)


def test_buckets_that_cannot_be_made_leave_those_that_there_are() -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(inner, model, world=world)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()

        step()
        model.requires_grad_(False)
        with raises(ConfigError, "nothing-to-train"):
            optimizer.fuse(1.0)
        model.requires_grad_(True)
        before = model.bias.tolist()
        step()
        moved = [old - new for old, new in zip(before, model.bias.tolist(), strict=True)]
        assert moved == pytest.approx([0.19, 0.19])  # with the momentum of the first one
        optimizer.close()

    run_ranks(2, rank)


def test_a_plan_that_is_refused_leaves_the_settings_as_they_are() -> None:
    def rank(world: World) -> None:
        model, other = nn.Linear(3, 2), nn.Linear(3, 4)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world)
        optimizer.fuse(7.0)
        specs = [ParamSpec(name, tuple(p.shape)) for name, p in other.named_parameters()]
        layer = LayerSpec("0", tuple(specs), 1)
        workload = Workload("other", "", (layer,), batch_size=1, unit="img")
        profile = profile_workload(workload, feed_forward_s=1.0, backprop_s=2.0)
        link = LinkModel(1e-3, 1e-9)
        with pytest.raises(ConfigError, match="another model"):
            optimizer.follow(make_plan(profile, Costs(2, link, link), world_size=2, eager=False))
        assert optimizer.config.bucket_cap_mb == 7.0
        optimizer.close()

    run_ranks(2, rank)


def test_a_cap_that_is_refused_leaves_the_settings_as_they_are() -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world, eager=True)
        model(torch.ones(1, 3)).sum().backward()
        with raises(UsageError, "eager-forbids", "eager=True", "promises a step"):
            optimizer.fuse(7.0)
        assert optimizer.config.bucket_cap_mb is None
        optimizer.step()
        optimizer.close()

    run_ranks(2, rank)


def test_after_close_nothing_is_laid_out_anew() -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world)
        optimizer.close()
        with raises(UsageError, "optimizer-closed"):
            optimizer.fuse(7.0)
        assert type(model._parameters) is dict and optimizer.config.bucket_cap_mb is None
        model.extra = nn.Linear(2, 2)
        with raises(UsageError, "optimizer-closed"):
            optimizer.add_param_group({"params": model.extra.parameters()})
        assert len(optimizer.state_dict()["param_groups"]) == 1

    run_ranks(2, rank)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("size", [1, 2])
def test_a_script_module_is_refused_by_name(size: int) -> None:
    # Not on the ranks' threads: torch's compiler of scripts takes one at a time.
    scripts = [torch.jit.script(nn.Linear(2, 2)) for _ in range(size)]

    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(3, 2), scripts[world.rank])
        with raises(ConfigError, "module-not-served", "module 1", "is a script"):
            DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, world=world)
        inner = torch.optim.SGD(model[0].parameters(), lr=0.1)  # as with a teacher's network
        optimizer = DistributedOptimizer(inner, model, world=world, check_every=1)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.close()

    run_ranks(size, rank)


def with_wide_gradient() -> nn.Parameter:
    param = nn.Parameter(torch.zeros(3))
    param.grad_dtype = torch.float64
    return param


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("bad", "optimizer"),
    [
        (with_wide_gradient, torch.optim.SGD),
        (lambda: nn.Parameter(torch.zeros(3, device="meta")), torch.optim.SGD),
    ],
    ids=["wide gradient", "elsewhere"],
)
def test_parameters_that_cannot_be_served_are_not_added(
    size: int, bad: Callable[[], nn.Parameter], optimizer: Any
) -> None:
    """Everything is as it was, and training goes on."""

    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        wrapped = DistributedOptimizer(
            optimizer(model.parameters(), lr=0.1), model, world=world, plan=None
        )
        model.extra = bad()
        with pytest.raises(ConfigError):
            wrapped.add_param_group({"params": [model.extra]})
        assert len(wrapped.param_groups) == 1 and len(wrapped.state_dict()["param_groups"]) == 1
        del model.extra
        wrapped.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        wrapped.step()
        wrapped.synchronize()
        wrapped.close()

    run_ranks(size, rank)


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_scales_its_rows_in_the_forward_is_refused(layer: Any) -> None:
    """Each rank would scale the rows of its own samples alone."""

    def rank(world: World) -> None:
        model = nn.Sequential(layer(6, 4, max_norm=1.0), nn.Linear(4, 2))
        with raises(ConfigError, "module-not-served", "module 0", "max_norm", "1.0"):
            DistributedOptimizer(torch.optim.SGD(model.parameters()), model, world=world)
        DistributedOptimizer(torch.optim.SGD(model[1].parameters()), model, world=world).close()

    run_ranks(2, rank)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_rows_that_are_scaled_after_each_step_stay_alike(gather: Gather) -> None:
    """As the refusal advises: the same numbers as in one process."""

    def trained(world: World | None) -> torch.Tensor:
        model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2))
        fill(model)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if world is not None:
            optimizer = DistributedOptimizer(optimizer, model, world=world, gather=gather)
        tokens = torch.tensor([[1, 2], [2, 4]])
        for _ in range(3):
            optimizer.zero_grad()
            model(tokens if world is None else tokens[world.rank]).square().mean().backward()
            optimizer.step()
            weight = model.get_parameter("0.weight").data
            weight.copy_(weight.renorm(2, 0, 0.5))
        value = model.get_parameter("0.weight").detach().clone()
        if world is not None:
            optimizer.close()
        return value

    expected = trained(None)

    def rank(world: World) -> None:
        torch.testing.assert_close(trained(world), expected)

    run_ranks(2, rank)
