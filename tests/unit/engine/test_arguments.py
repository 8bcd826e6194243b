"""Arguments of a wrong kind are refused with what to give instead."""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn

from dearmpi import (
    DistributedOptimizer,
    EngineConfig,
    SyncBatchNorm,
    broadcast_buffers,
    broadcast_parameters,
    connect,
    convert_sync_batchnorm,
)
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from tests.codes import raises
from tests.fakes.ranks import run_ranks


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("eager", "no", "True or False"),
        ("eager", 1, "True or False"),
        ("master_weights", "yes", "True or False"),
        ("bucket_cap_mb", "4", "a number, or None"),
        ("bucket_cap_mb", True, "a number, or None"),
        ("window", 2.5, "a whole number"),
        ("shards", 3, "a list with a number for each rank"),
        ("shards", torch.ones(2), "a list with a number for each rank"),
        ("check_every", "10", "a whole number, or None"),
    ],
)
def test_a_setting_of_another_type_is_named(name: str, value: Any, told: str) -> None:
    with raises(ConfigError, "wrong-type", name, told):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("size", [1, 2])
def test_mpis_own_sum_of_what_it_cannot_add_is_refused_before_the_first_backward(
    size: int, dtype: torch.dtype
) -> None:
    """There it would end the job."""

    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2, dtype=dtype))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with raises(ConfigError, "dtype-not-served", dtype, "1.weight"):
            DistributedOptimizer(inner, model, world=world, reduce_scatter="native")
        model[1].requires_grad_(False)
        DistributedOptimizer(inner, model, world=world, reduce_scatter="native").close()

    run_ranks(size, rank)


@pytest.mark.parametrize("size", [1, 2])
def test_a_gradient_of_another_type_than_its_parameter_is_refused(size: int) -> None:
    """Backward would fail in torch, with nothing about what to do."""

    def rank(world: World) -> None:
        model = nn.Linear(3, 2, dtype=torch.bfloat16)
        model.weight.grad_dtype = torch.float32
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with raises(ConfigError, "dtype-not-served", "torch.bfloat16", "grad_dtype", "32"):
            DistributedOptimizer(inner, model, world=world, master_weights=True)

    run_ranks(size, rank)


@pytest.mark.parametrize(
    ("clip", "told"),
    [
        (lambda o, m: o.clip_grad_norm_(m.parameters(), 1.0), r"clip_grad_norm_\(max_norm, norm"),
        (lambda o, m: o.clip_grad_norm_([m.weight, m.bias]), r"clip_grad_norm_\(max_norm, norm"),
        (lambda o, m: o.clip_grad_norm_(1.0, 0), "norm_type is 0; it must be above 0"),
        (lambda o, m: o.clip_grad_norm_(-1.0), r"max_norm is -1.0; it must be above 0"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_no_norm_to_clip_by_is_refused(
    size: int, clip: Callable[[Any, Any], object], told: str
) -> None:
    """As where a script calls it as it called torch.nn.utils.clip_grad_norm_."""

    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer: Any = DistributedOptimizer(inner, model, world=world)
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(ConfigError, match=told):
            clip(optimizer, model)
        found = [optimizer.clip_grad_norm_(torch.tensor(9.0), kind).item() for kind in ("inf", 2)]
        assert found == [1.0, pytest.approx(math.sqrt(8))]
        optimizer.close()

    run_ranks(size, rank)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (torch.optim.LBFGS, "step() takes no closure"),
        (torch.optim.SparseAdam, "update tensors by dense gradients"),
        (lambda params: torch.optim.SGD(params, differentiable=True), "by dense gradients"),
    ],
    ids=["closure", "sparse", "differentiable"],
)
def test_an_optimizer_whose_trial_step_fails_is_refused_with_the_reason(
    make: Callable[[Any], torch.optim.Optimizer], told: str
) -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        with raises(ConfigError, "trial-step-failed", told):
            DistributedOptimizer(make(model.parameters()), model, world=world)

    run_ranks(1, rank)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 and newer have Muon")
@pytest.mark.parametrize("shards", ["even", [3, 1]])
def test_an_optimizer_that_takes_no_pieces_is_told_of_owners(shards: Any) -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2, bias=False)
        inner = torch.optim.Muon(model.parameters())
        with raises(ConfigError, "trial-step-failed", "shards='whole'", "gather='gradients'"):
            DistributedOptimizer(inner, model, world=world, shards=shards)

    run_ranks(2, rank)


def test_a_batch_normalisation_in_two_places_stays_one() -> None:
    def rank(world: World) -> None:
        norm = nn.BatchNorm1d(3)
        model = nn.Sequential(norm, nn.Linear(3, 3), norm, nn.Sequential(norm))
        layers: Any = convert_sync_batchnorm(model, world)
        assert layers[0] is layers[2] is layers[3][0] is not norm

    run_ranks(2, rank)


class Activated(nn.BatchNorm2d):
    """As timm's ``BatchNormAct2d``."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.act = nn.ReLU()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.act(super().forward(input))
        return outputs


class Fixed(nn.BatchNorm2d):
    """Keeps its statistics in training."""

    def train(self, mode: bool = True) -> Fixed:
        return super().train(False)


def frozen(num_features: int) -> nn.BatchNorm2d:
    """The same for one layer."""
    layer = nn.BatchNorm2d(num_features).eval()
    layer.train = lambda mode=True: layer  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize("make", [Activated, Fixed, frozen])
def test_a_batch_normalisation_that_does_more_is_not_converted(
    make: Callable[[int], nn.Module],
) -> None:
    def rank(world: World) -> None:
        layer = make(3)
        model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(layer))
        told = f"module 1.0 is a {type(layer).__name__}, which does more than normalise"
        with pytest.raises(ConfigError, match=told):
            convert_sync_batchnorm(model, world)
        assert type(model[0]) is nn.BatchNorm2d

    run_ranks(1, rank)


class Named(nn.BatchNorm1d):
    """Only begins with other values."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features, eps=1e-3, bias=False)


@pytest.mark.skipif(
    "bias" not in signature(nn.BatchNorm1d).parameters, reason="torch before 2.13 always has a bias"
)
def test_a_batch_normalisation_with_options_of_its_own_is_converted() -> None:
    def rank(world: World) -> None:
        layer: Any = convert_sync_batchnorm(Named(3), world)
        made = SyncBatchNorm(3, 1e-3, bias=False, world=world)
        assert layer.eps == made.eps == 1e-3
        assert layer.state_dict().keys() == made.state_dict().keys()
        inputs = torch.arange(12.0).view(4, 3)
        torch.testing.assert_close(layer(inputs), Named(3)(inputs))

    run_ranks(1, rank)


class Comm:
    """As mpi4py's, which is another class for each kind."""

    size = 2


@pytest.mark.parametrize("group", [Comm(), World, 0, [0, 1]])
def test_a_group_of_some_ranks_is_refused_with_what_to_do(group: Any) -> None:
    """In the place of a world, wherever one is taken."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    kind = type(group).__name__
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for take in (
        lambda: DistributedOptimizer(optimizer, model, world=group),
        lambda: broadcast_parameters(model, group),
        lambda: broadcast_buffers(model, group),
        lambda: convert_sync_batchnorm(model, group),
        lambda: SyncBatchNorm(2, world=group),
    ):
        with raises(ConfigError, "wrong-type", f"world is of type {kind}", "dearmpi.connect()"):
            take()
    with raises(ConfigError, "wrong-type", f"progress is of type {kind}", "'thread'", "'poll'"):
        connect(group)
