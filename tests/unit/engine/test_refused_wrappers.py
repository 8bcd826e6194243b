"""What torch wraps around a model or an optimizer to share work among ranks is refused by name, or
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import (
    PostLocalSGDOptimizer,
    ZeroRedundancyOptimizer,
    named_optimizer,
)
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import Gather
from dearmpi.errors import ConfigError, UsageError
from dearmpi.local.local_optimizer import LocalOptimizer
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill
from tests.unit.engine.test_refused_modules import process_group

TURN = Lock()  # torch.distributed is of the process, and ranks are its threads
INPUTS = torch.arange(15.0).view(3, 5) / 15


def build() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    fill(model)
    return model


def wrap(model: nn.Module, world: World, **settings: Any) -> DistributedOptimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return DistributedOptimizer(optimizer, model, world=world, **settings)


def train(optimizer: torch.optim.Optimizer, call: Callable[[torch.Tensor], Any]) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        call(INPUTS).square().mean().backward()
        optimizer.step()


def replicated(model: nn.Module) -> nn.Module:
    composable = pytest.importorskip("torch.distributed._composable")
    composable.replicate(model)
    return model


@pytest.mark.parametrize("when", ["before", "after", "later"])
@pytest.mark.parametrize("wrapper", [DistributedDataParallel, replicated])
@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_a_wrapper_that_averages_gradients_is_refused_in_the_first_forward(
    gather: Gather, wrapper: Callable[[nn.Module], nn.Module], when: str
) -> None:
    if wrapper is replicated and when == "before":
        return  # it shows in the model: see below
    if wrapper is replicated and torch.__version__.startswith("2.6."):
        pytest.skip("torch 2.6 does not show that the forward of replicate() is running")

    def rank(world: World) -> None:
        model = build()
        with TURN:
            called = wrapper(model) if when == "before" else model
        optimizer = wrap(model, world, gather=gather)
        if when == "later":
            train(optimizer, model)
        with TURN:
            called = wrapper(model) if when != "before" else called
            with raises(UsageError, "wrapped-model", "through torch's", "leave it out"):
                called(INPUTS)
            DistributedDataParallel._active_ddp_module = None  # replicate() leaves it behind
        optimizer.close()

    with process_group(2):
        run_ranks(2, rank)


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, replicated])
def test_a_wrapper_is_found_where_torch_distributed_begins_after_the_first_steps(
    wrapper: Callable[[nn.Module], nn.Module],
) -> None:
    """Modules look for wrappers only once there may be one."""

    def rank(world: World) -> None:
        model = build()
        optimizer = wrap(model, world)
        train(optimizer, model)
        model(INPUTS)
        if wrapper is replicated:
            wrapper(model[2])
        with TURN, process_group(2):
            called = model if wrapper is replicated else wrapper(model[0])
            with raises(UsageError, "wrapped-model", "leave it out"):
                called(INPUTS)
            DistributedDataParallel._active_ddp_module = None  # replicate() leaves it behind
        optimizer.close()

    run_ranks(2, rank)


def test_no_sync_of_the_wrapper_makes_no_difference() -> None:
    def rank(world: World) -> None:
        model = build()
        optimizer = wrap(model, world)
        with TURN:
            wrapper = DistributedDataParallel(model)
            with (
                wrapper.no_sync(),
                raises(UsageError, "wrapped-model", "DistributedDataParallel"),
            ):
                wrapper(INPUTS)
        optimizer.close()

    with process_group(2):
        run_ranks(2, rank)


def test_a_compiled_model_in_a_wrapper_is_refused_as_it_is_compiled() -> None:
    def rank(world: World) -> None:
        model = build()
        optimizer = wrap(model, world)
        with TURN:
            wrapper = DistributedDataParallel(torch.compile(model, backend="eager"))
            with pytest.raises(Exception, match="through torch's DistributedDataParallel"):
                wrapper(INPUTS)
        optimizer.close()

    with process_group(2):
        run_ranks(2, rank)


def test_a_wrapper_of_other_parameters_is_left_alone() -> None:
    """As of a teacher, or of what is around the model with its parameters left out."""
    expected = build()
    train(torch.optim.SGD(expected.parameters(), lr=0.1), expected)

    def rank(world: World) -> None:
        model = build()
        optimizer = wrap(model, world)
        last = nn.Linear(2, 2)
        around = nn.Sequential(model, last)
        names = [name for name, _ in around.named_parameters() if name.startswith("0.")]
        with TURN, torch.no_grad():
            last.weight.copy_(torch.eye(2))
            last.bias.zero_()
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(around, names)
            wrapper = DistributedDataParallel(around)

        def call(inputs: torch.Tensor) -> torch.Tensor:
            optimizer.synchronize()  # else it would wait, in its turn, for who has not had one
            with TURN, wrapper.no_sync():  # since this process group can reduce nothing
                found: torch.Tensor = wrapper(inputs)
            return found

        train(optimizer, call)
        optimizer.synchronize()
        for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(found, wanted)
        optimizer.close()

    with process_group(2):
        run_ranks(2, rank)


def test_a_part_that_was_given_to_replicate_is_refused() -> None:
    def rank(world: World) -> None:
        model = build()
        with TURN:
            replicated(model[0])
        with raises(ConfigError, "wrapped-model", "module 0", "replicate()"):
            wrap(model, world)
        model = build()
        optimizer = wrap(model, world)
        weight: Any = model[2].weight
        with TURN:
            replicated(model[2])
            with raises(UsageError, "wrapped-model", "module 2", "replicate()"):
                model(INPUTS)
        loss = nn.functional.linear(INPUTS[:, :4], weight).sum()  # past the hooks
        with raises(UsageError, "wrapped-model", "module 2", "replicate()"):
            loss.backward()
        optimizer.close()

    with process_group(2):
        run_ranks(2, rank)


@pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11 crashes where a second thread calls fully_shard(); ranks are threads here",
)
@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_fully_shard_is_refused_before_and_after(gather: Gather) -> None:
    def rank(world: World) -> None:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with TURN:
            fully_shard(model[0], mesh=mesh)
        told = r"module 0 of the model was given to fully_shard\(\) \(FSDP\).*leave it out"
        with pytest.raises(ConfigError, match=told):
            wrap(model, world, gather=gather)
        with pytest.raises(ConfigError, match=told):  # with parameters that are gone
            DistributedOptimizer(optimizer, model, world=world, gather=gather)
        model = build()
        wrapped = wrap(model, world, gather=gather)
        with TURN, raises(UsageError, "parameter-sharded", "parameter 2.weight", "DTensor"):
            fully_shard(model[2], mesh=mesh)
        train(wrapped, model)
        wrapped.close()

    with process_group(2):
        mesh = init_device_mesh("cpu", (2,))
        run_ranks(2, rank)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fully_sharded_data_parallel_is_refused_before_and_after(use_orig_params: bool) -> None:
    def shard(module: nn.Module) -> nn.Module:
        with TURN:
            return FullyShardedDataParallel(
                module, use_orig_params=use_orig_params, device_id=torch.device("cpu")
            )

    def rank(world: World) -> None:
        model = build()
        sharded = shard(model)
        with raises(ConfigError, "wrapped-model", "FullyShardedDataParallel"):
            wrap(sharded, world)
        with raises(ConfigError, "parameter-sharded", "FullySharded"):
            wrap(model, world)
        model = build()
        optimizer = wrap(model, world)
        with raises(UsageError, "parameter-sharded", "parameter 0.weight", "FullyShard"):
            shard(model)
        optimizer.close()

    with process_group(2):
        run_ranks(2, rank)


def test_a_distributed_tensor_is_refused_also_where_it_is_not_trained() -> None:
    def rank(world: World) -> None:
        model = build()
        with TURN:
            spread = distribute_tensor(torch.zeros(2), mesh, [Replicate()])
        model[2].bias = nn.Parameter(spread, requires_grad=False)
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        with raises(ConfigError, "parameter-sharded", "2.bias", "DTensor"):
            DistributedOptimizer(optimizer, model, world=world)

    with process_group(2):
        mesh = init_device_mesh("cpu", (2,))
        run_ranks(2, rank)


@pytest.mark.parametrize("when", ["before", "after"])
def test_data_parallel_changes_nothing_on_one_device(when: str) -> None:
    expected = build()
    train(torch.optim.SGD(expected.parameters(), lr=0.1), expected)

    def rank(world: World) -> None:
        model = build()
        parallel = DataParallel(model)
        optimizer = wrap(parallel if when == "before" else model, world)
        train(optimizer, parallel)
        optimizer.synchronize()
        for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(found, wanted)
        optimizer.close()

    run_ranks(2, rank)


def test_data_parallel_over_several_devices_is_refused() -> None:
    def rank(world: World) -> None:
        parallel = DataParallel(build())
        parallel.device_ids = [0, 1]
        with raises(ConfigError, "wrapped-model", "DataParallel", "2"):
            wrap(parallel, world)

    run_ranks(2, rank)


def test_optimizers_that_share_work_among_ranks_are_refused() -> None:
    model = build()
    inside = torch.optim.SGD(model.parameters(), lr=0.1)
    with process_group(2):
        sharing = (
            ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1),
            PostLocalSGDOptimizer(inside, PeriodicModelAverager(period=1)),
        )
    for optimizer in sharing:
        with raises(ConfigError, "wrapped-optimizer", type(optimizer).__name__):
            DistributedOptimizer(optimizer, model)


def test_an_optimizer_is_distributed_once() -> None:
    model = build()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for again in (DistributedOptimizer, LocalOptimizer):
        with raises(ConfigError, "wrapped-optimizer", "is a DistributedOptimizer already"):
            again(optimizer, model)


def test_other_optimizers_of_torch_distributed_are_refused_by_name() -> None:
    model = build()
    kind: Any = named_optimizer._NamedOptimizer
    named = kind(dict(model.named_parameters()), torch.optim.SGD, lr=0.1)
    with raises(ConfigError, "wrapped-optimizer", "_NamedOptimizer"):
        DistributedOptimizer(named, model)


def test_an_optimizer_that_averages_parameters_around_this_one_is_refused() -> None:
    def rank(world: World) -> None:
        model = build()
        optimizer = wrap(model, world)
        around = PostLocalSGDOptimizer(optimizer, averager)
        model(INPUTS).sum().backward()
        with raises(UsageError, "wrapped-optimizer", "PostLocalSGDOptimizer"):
            around.step()
        optimizer.step()
        optimizer.close()

    with process_group(2):
        averager = PeriodicModelAverager(period=1)
        run_ranks(2, rank)


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_without_a_shape_are_refused_by_name(size: int) -> None:
    def rank(world: World) -> None:
        model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
        with raises(ConfigError, "tensor-without-values", "0.weight"):
            wrap(model, world)
        model(INPUTS)
        optimizer = wrap(model, world)
        train(optimizer, model)
        model.append(nn.LazyLinear(2))
        with raises(ConfigError, "tensor-without-values", "2.weight"):
            optimizer.add_param_group({"params": list(model[2].parameters())})
        assert len(optimizer.param_groups) == 1
        optimizer.close()

    run_ranks(size, rank)
