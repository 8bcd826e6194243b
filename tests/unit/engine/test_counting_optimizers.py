"""Optimizers that count in their param groups, as schedule-free ones and Prodigy do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError, UsageError
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill

GATHERS = pytest.mark.parametrize("gather", ["parameters", "gradients"])
NUM_STEPS = 6


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free AdamW: parameters are y while it trains, and x after ``eval()``; z is kept.

    Its groups have what it counts: steps, the largest rate, and the sum of weights.
    """

    def __init__(self, params: Any, lr: float = 0.05, warmup: int = 3) -> None:
        counted = {"k": 0, "weight_sum": 0.0, "lr_max": -1.0, "train_mode": False}
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "warmup": warmup, **counted})

    @torch.no_grad()
    def _move(self, train: bool) -> None:
        for group in self.param_groups:
            beta = group["betas"][0]
            if group["train_mode"] != train:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(self.state[param]["z"], 1 - (beta if train else 1 / beta))
                group["train_mode"] = train

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("the optimizer was not in train mode when step was called")
        for group in self.param_groups:
            beta, beta2 = group["betas"]
            group["k"] += 1
            rate = group["lr"] * min(1.0, group["k"] / group["warmup"])
            group["lr_max"] = max(rate, group["lr_max"])
            group["weight_sum"] += group["lr_max"] ** 2
            share = group["lr_max"] ** 2 / group["weight_sum"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["z"] = param.clone()
                    state["exp_avg_sq"] = torch.zeros_like(param)
                square = (
                    state["exp_avg_sq"]
                    .mul_(beta2)
                    .addcmul_(param.grad, param.grad, value=1 - beta2)
                )
                normed = param.grad / (square / (1 - beta2 ** group["k"])).sqrt().add_(1e-4)
                param.lerp_(state["z"], share).add_(normed, alpha=rate * (beta * (1 - share) - 1))
                state["z"].sub_(normed, alpha=rate)


class CountsInItsGroups(torch.optim.SGD):
    """Whose steps grow shorter, as it counts them in an entry that its first step makes."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                param.data.add_(param.grad, alpha=-group["lr"] / group["step"])


class Prodigy(torch.optim.Optimizer):
    """Its rate is found from how far all parameters have come along their gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "k": 0, "d": 1e-3, "d_numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        d = self.param_groups[0]["d"]
        params = [param for group in self.param_groups for param in group["params"]]
        come, size = 0.0, 0.0
        for param in params:
            state = self.state[param]
            if not state:
                state["p0"], state["s"] = param.clone(), torch.zeros_like(param)
            come += d * float((param.grad * (state["p0"] - param)).sum())
            size += float(state["s"].add_(param.grad, alpha=d).abs().sum())
        for group in self.param_groups:
            group["k"] += 1
            group["d_numerator"] += come
            group["d"] = max(d, group["d_numerator"] / size)
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"] * group["d"])


def schedule_free(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, one of which learns more slowly."""
    first, *others = model.parameters()
    return ScheduleFree([{"params": [first], "lr": 0.02}, {"params": others}])


def build() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    fill(model.double())
    return model


def train(
    make: Callable[[Any], torch.optim.Optimizer],
    world: World | None,
    *,
    resumes: bool = False,
    **settings: Any,
) -> list[Tensor]:
    """Parameters at the end, and at each evaluation on the way; and what the groups have."""
    model = build()
    optimizer: Any = make(model)

    def wrap(inner: Any) -> Any:
        if world is None:
            return inner
        return DistributedOptimizer(inner, model, world=world, bucket_cap_mb=1e-4, **settings)

    optimizer = wrap(optimizer)
    switch = getattr(optimizer, "train", None), getattr(optimizer, "eval", None)
    assert (switch[0] is None) == (make is counting)
    seen = []
    for step in range(NUM_STEPS):
        if hasattr(optimizer, "train"):
            optimizer.train()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(6, 3, generator=generator, dtype=torch.float64)
        mine = inputs if world is None else inputs[world.rank :: world.size]
        model(mine).square().mean().backward()
        optimizer.step()
        if step % 2 and hasattr(optimizer, "eval"):
            optimizer.eval()
            optimizer.eval()  # once more changes nothing
            seen.append(model(inputs).detach())
        if resumes and step == 2:
            saved = optimizer.state_dict()
            if world is not None:
                optimizer.close()
            optimizer = wrap(make(model))
            optimizer.load_state_dict(saved)
    saved = optimizer.state_dict()["param_groups"]
    options = [float(v) for g in saved for v in g.values() if isinstance(v, (int, float))]
    if world is not None:
        optimizer.close()
    return [*seen, torch.tensor(options), *(p.detach().clone() for p in model.parameters())]


def counting(model: nn.Module) -> torch.optim.Optimizer:
    return CountsInItsGroups(model.parameters(), lr=0.1)


def assert_same(found: list[list[Tensor]], wanted: list[Tensor]) -> None:
    for values in found:
        for one, other in zip(values, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


@GATHERS
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("make", [schedule_free, counting], ids=["schedule-free", "counting"])
def test_an_optimizer_that_counts_in_its_groups_trains_as_one_process_does(
    make: Callable[[Any], torch.optim.Optimizer], size: int, gather: Any
) -> None:
    """Also on a rank that owns nothing of some group."""
    wanted = train(make, None, resumes=True)
    assert_same(
        run_ranks(size, lambda world: train(make, world, gather=gather, resumes=True)), wanted
    )


@pytest.mark.parametrize("settings", [{"eager": True}, {"schedule": "serial"}])
def test_a_schedule_free_optimizer_trains_alike_with_every_schedule(
    settings: dict[str, Any],
) -> None:
    wanted = train(schedule_free, None)
    assert_same(run_ranks(2, lambda world: train(schedule_free, world, **settings)), wanted)


def test_a_rank_without_batches_counts_as_the_others_do() -> None:
    def rank(world: World) -> list[float]:
        model = build()
        optimizer: Any = DistributedOptimizer(schedule_free(model), model, world=world)
        optimizer.train()
        with optimizer.join():
            for _ in range(2 + world.rank):
                model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        optimizer.eval()
        found = [group[key] for group in optimizer.param_groups for key in ("k", "weight_sum")]
        optimizer.close()
        return [*found, *(float(param.detach().sum()) for param in model.parameters())]

    one, other = run_ranks(2, rank)
    assert one == other and one[0] == 3


@GATHERS
def test_a_step_that_the_optimizer_refuses_can_be_taken_once_it_may(gather: Any) -> None:
    """Its own words come from ``step`` itself."""

    def rank(world: World) -> None:
        model = build()
        inner = schedule_free(model)
        optimizer: Any = DistributedOptimizer(inner, model, world=world, gather=gather)
        model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        with pytest.raises(RuntimeError, match="not in train mode"):
            optimizer.step()
        optimizer.train()
        optimizer.step()
        assert optimizer.param_groups[0]["k"] == 1
        optimizer.close()

    run_ranks(2, rank)


class ChangesStateToo(ScheduleFree):
    def eval(self) -> None:
        super().eval()
        for entries in self.state.values():
            entries["z"].zero_()


def test_an_eval_that_a_shard_would_not_see_is_refused() -> None:
    def rank(world: World) -> None:
        model = build().float()
        kinds: list[tuple[Any, Any, str]] = [
            (ChangesStateToo, "fp32", "changes the optimizer's state"),
            (ScheduleFree, "bf16", "not reach their master copies"),
        ]
        for make, comm_dtype, told in kinds:
            inner = make(model.parameters())
            inner.train()
            optimizer: Any = DistributedOptimizer(inner, model, world=world, comm_dtype=comm_dtype)
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            with pytest.raises(UsageError, match=told):
                optimizer.eval()
            optimizer.close()

    run_ranks(2, rank)


@GATHERS
@pytest.mark.parametrize("size", [1, 2])
def test_prodigy_trains_on_one_rank_and_is_refused_on_several(size: int, gather: Any) -> None:
    """Buckets that are updated each by itself would find rates of their own."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Prodigy(model.parameters())

    def rank(world: World) -> list[Tensor]:
        if world.size == 1:
            return train_plainly(world)
        with raises(ConfigError, "optimizer-couples-buckets", "Prodigy changes 'd"):
            model = build()
            DistributedOptimizer(make(model), model, world=world, gather=gather)
        return []

    def train_plainly(world: World | None) -> list[Tensor]:
        model = build()
        optimizer: Any = make(model)
        if world is not None:
            optimizer = DistributedOptimizer(optimizer, model, world=world, gather=gather)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
        return [param.detach().clone() for param in model.parameters()]

    found = run_ranks(size, rank)
    if size == 1:
        assert_same(found, train_plainly(None))
