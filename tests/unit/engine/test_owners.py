"""Owners of whole tensors: what chooses them, what is refused, and what is warned of."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dearmpi import DistributedOptimizer, EngineConfig
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError, MismatchError
from dearmpi.train.loop.optimizers import MuonWithAdamW, muon_groups
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.mpi.oracle import NEEDS_MUON


class PerTensor(torch.optim.Optimizer):
    """A step along the gradient, as long as ``lr`` over the norm of what ``norms_of`` says."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def norms(self, params: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        for param in params:
            assert param.grad is not None
            yield param.grad.norm()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for param, norm in zip(params, self.norms(params), strict=True):
                param.sub_(param.grad / (norm + 1e-6) * group["lr"])


class ReadsNeighbours(PerTensor):
    """Norms over the tensors of one shape: alike for two of one shape, so that buckets show it."""

    def norms(self, params: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        rows = [param for param in params if param.dim() == 2 and len(param) == 6]
        for param in params:
            same = [row.grad for row in rows if row.grad is not None]
            own = param.grad
            assert own is not None
            yield torch.stack([grad.norm() for grad in [own, *same]]).sum()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def test_auto_is_even_for_elementwise_optimizers_and_whole_for_others() -> None:
    def rank(world: World) -> None:
        for make, shards in ((torch.optim.AdamW, "even"), (PerTensor, "whole")):
            model = net()
            optimizer = DistributedOptimizer(make(model.parameters()), model, world=world)
            assert all(bucket.cuts.is_even == (shards == "even") for bucket in optimizer.layout)
            optimizer.close()

    run_ranks(2, rank)


def test_an_optimizer_that_reads_its_neighbours_is_refused() -> None:
    def rank(world: World) -> None:
        model = net()
        for shards in ("whole", "auto"):
            with raises(ConfigError, "optimizer-couples-tensors", "(6, 4)", "apart differ"):
                DistributedOptimizer(
                    ReadsNeighbours(model.parameters()),
                    model,
                    world=world,
                    shards=shards,
                )

    run_ranks(2, rank)


@pytest.mark.parametrize(
    "settings", [{"gather": "gradients"}, {"compress": "topk"}, {"update_on": "host"}]
)
def test_settings_without_owners_are_refused(settings: dict[str, Any]) -> None:
    (name,) = settings
    with raises(ConfigError, "settings-contradict", "'whole'", name):
        EngineConfig(shards="whole", **settings)


def test_other_settings_keep_auto_from_owners() -> None:
    """The optimizer is then refused as before."""

    def rank(world: World) -> None:
        model = net()
        cures = ("'int8' or 'int4'", "keep it with gather='gradients'")
        settings: dict[str, Any] = {"world": world, "compress": "nonzero"}
        with raises(ConfigError, "optimizer-needs-whole-tensors", *cures):
            DistributedOptimizer(PerTensor(model.parameters()), model, **settings)
        kept = DistributedOptimizer(
            PerTensor(model.parameters()), model, gather="gradients", **settings
        )
        kept.close()

    run_ranks(2, rank)


@NEEDS_MUON
def test_half_precision_travels_with_owners_and_what_is_cut() -> None:
    """Both work on masters, of which replicas show all values rounded."""
    start = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 40))
    inputs = torch.randn(8, 12)

    def rank(world: World) -> None:
        model = copy.deepcopy(start)
        inner = MuonWithAdamW(muon_groups(model, list(model.parameters())), lr=1e-4)
        optimizer = DistributedOptimizer(inner, model, world=world, comm_dtype="bf16")
        for _ in range(12):
            optimizer.zero_grad()
            model(inputs + world.rank).square().mean().backward()
            optimizer.step()
        optimizer.synchronize()
        assert not all(bucket.cuts.is_even for bucket in optimizer.layout)
        state = optimizer.state_dict()["state"]
        params = [param for group in inner.param_groups for param in group["params"]]
        before = dict(zip(model.parameters(), start.parameters(), strict=True))
        assert len(state) == len(params) == 6
        for index, param in enumerate(params):
            master = state[index]["master"]
            assert torch.equal(param, master.bfloat16().float())
            assert float((master - before[param]).abs().max()) > 2e-4
        optimizer.close()

    run_ranks(2, rank)


def test_a_tensor_that_is_most_of_the_work_is_warned_of() -> None:
    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
        optimizer = torch.optim.Adafactor(model.parameters())
        if world.is_root:
            with pytest.warns(UserWarning, match=r"0\.weight is 9\d % of all.* 1\.9\d times"):
                wrapped = DistributedOptimizer(optimizer, model, world=world)
        else:
            wrapped = DistributedOptimizer(optimizer, model, world=world)
        wrapped.close()

    run_ranks(2, rank)


def test_groups_that_need_other_cuts_are_not_added_later() -> None:
    """State of cut parameters cannot go to owners."""

    class Either(PerTensor):
        def norms(self, params: list[torch.Tensor]) -> Iterator[torch.Tensor]:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        is_whole = group.get("whole", False)
                        yield param.grad.norm() if is_whole else torch.ones(())

    def rank(world: World) -> None:
        model = net()
        first, second = (list(layer.parameters()) for layer in model.children())
        optimizer = Either([{"params": first, "whole": False}])
        wrapped = DistributedOptimizer(optimizer, model, world=world)
        with raises(ConfigError, "optimizer-needs-whole-tensors", "shards='whole'"):
            wrapped.add_param_group({"params": second, "whole": True})
        wrapped.close()

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("weights", "code", "told"),
    [
        ([1.0, -1.0], "out-of-range", "[1.0, -1.0]"),
        ([0, 0], "out-of-range", "[0.0, 0.0]"),
        ([1.0, float("nan")], "out-of-range", "nan"),
        ([], "out-of-range", "[]"),
        (["1", "2"], "wrong-type", "'1'"),
        ("most", "unknown-choice", "'most'"),
    ],
)
def test_wrong_weights_are_refused(weights: Any, code: str, told: str) -> None:
    with raises(ConfigError, code, "shards", told):
        EngineConfig(shards=weights)


def test_weights_are_for_elementwise_optimizers_and_one_for_each_rank() -> None:
    def rank(world: World) -> None:
        model = net()
        with raises(ConfigError, "settings-contradict", "3 weights for 2 ranks"):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            DistributedOptimizer(optimizer, model, world=world, shards=[1, 2, 3])
        with raises(ConfigError, "optimizer-needs-whole-tensors"):
            DistributedOptimizer(PerTensor(model.parameters()), model, world=world, shards=[1, 2])

    run_ranks(2, rank)
    with raises(ConfigError, "settings-contradict", "compress"):
        EngineConfig(shards=[1, 2], compress="sketch")


def test_ranks_with_other_weights_are_named() -> None:
    def rank(world: World) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weights = [1.0, 2.0 + world.rank]
        with raises(MismatchError, "ranks-built-differently", "shards=(1.0, 2.0)", "(1.0, 3.0)"):
            DistributedOptimizer(optimizer, model, world=world, shards=weights)

    run_ranks(2, rank)


def test_training_with_matrices_of_state_goes_on_on_any_number_of_ranks() -> None:
    """As in one process that was never stopped, in fp64."""
    optimizers = pytest.importorskip("pytorch_optimizer", reason="an extra of the tests")

    torch.manual_seed(4)  # here, since ranks are threads that draw from one generator
    initial = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()

    def train_on(steps: range, start: Any = None, world: World | None = None) -> Any:
        model = copy.deepcopy(initial)
        optimizer: Any = optimizers.Shampoo(model.parameters(), lr=0.01)
        if world is not None:
            optimizer = DistributedOptimizer(optimizer, model, world=world, bucket_cap_mb=1e-4)
        if start is not None:
            model.load_state_dict(start[0])
            optimizer.load_state_dict(copy.deepcopy(start[1]))  # torch steps on what it is given
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            data = torch.randn(24, 6, generator=generator, dtype=torch.float64)
            own = data if world is None else data.chunk(world.size)[world.rank]
            optimizer.zero_grad()
            (model(own) - own.sin()).square().mean().backward()
            optimizer.step()
        found = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if world is not None:
            optimizer.close()
        return found

    expected = train_on(range(6))
    start = run_ranks(4, lambda world: train_on(range(3), None, world))[0]
    assert start[1]["state"][0]["pre_cond_1"].shape == (6, 6)
    for size in (1, 2, 3):
        for model, state in run_ranks(size, lambda world: train_on(range(3, 6), start, world)):
            torch.testing.assert_close(model, expected[0], rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(state["state"], expected[1]["state"], rtol=1e-10, atol=1e-12)
    # One process without this package reads it as its own.
    torch.testing.assert_close(train_on(range(3, 6), start), expected, rtol=1e-10, atol=1e-12)
