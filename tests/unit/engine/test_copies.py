"""What is copied or written to a file while it is attached to an optimizer."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn

from dearmpi import DistributedOptimizer, SyncBatchNorm
from dearmpi.comm.world import World
from dearmpi.engine.trace.layer_spans import LayerSpans
from dearmpi.engine.trace.spans import Spans
from dearmpi.errors import UsageError
from dearmpi.tune.layer_timer import LayerTimer
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill


def make_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    fill(model)
    return model


def from_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, from_file])
def test_a_copy_of_a_model_that_is_measured_is_an_ordinary_one(make_copy: Any) -> None:
    def rank(world: World) -> int:
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world, check_every=1)
        timer = LayerTimer(model, waited=lambda: optimizer.waited_s)  # which no file takes
        spans = LayerSpans(model, Spans())
        twin = make_copy(model)
        for _ in range(3):
            twin(torch.ones(1, 4)).sum().backward()
        num_seen = timer.num_seen
        timer.detach()
        spans.remove()
        optimizer.close()
        for module in twin.modules():
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                assert not hasattr(hook, "__self__") and not hook.__closure__
        return num_seen

    assert run_ranks(2, rank) == [0, 0]


def num_bytes(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_a_model_is_saved_and_copied_without_the_rest(dtype: torch.dtype) -> None:
    """As an adapter is, next to which other layers would be published."""

    def rank(world: World) -> None:
        model: Any = nn.Sequential(nn.Linear(4, 999), nn.Linear(999, 4)).to(dtype)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world, bucket_cap_mb=1.0)
        with optimizer.no_sync():
            model(torch.ones(1, 4, dtype=dtype)).sum().backward()
        bias = model[1].bias
        for part in ({"bias": bias}, nn.ParameterList([bias]).state_dict(), bias.grad):
            assert num_bytes(part) < 2000
        assert copy.deepcopy(bias).untyped_storage().nbytes() == bias.nbytes
        optimizer.step()
        optimizer.close()
        assert num_bytes(bias) < 2000

    run_ranks(2, rank)


def test_safetensors_saves_a_model_by_itself(tmp_path: Path) -> None:
    """It refuses tensors that share a storage of which none covers all."""

    def rank(world: World) -> None:
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world)
        file = str(tmp_path / f"{world.rank}.safetensors")
        save_model(model, file)
        found = load_file(file)
        for name, value in model.state_dict().items():
            assert torch.equal(found[name], value)
        optimizer.close()

    run_ranks(2, rank)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, pickle.dumps])
def test_an_optimizer_has_no_copies(make_copy: Any) -> None:
    def rank(world: World) -> None:
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world)
        with raises(UsageError, "optimizer-copied", "state_dict"):
            make_copy(optimizer)
        optimizer.close()

    run_ranks(2, rank)
    run_ranks(1, rank)


def test_a_synchronized_layer_goes_through_a_file() -> None:
    def rank(world: World) -> None:
        layer = SyncBatchNorm(3, world=world)
        layer(torch.arange(6.0).view(2, 3) * (1 + world.rank))
        read = from_file(layer)
        assert layer.running_mean is not None
        assert torch.equal(read.running_mean, layer.running_mean)
        inputs = torch.arange(6.0).view(2, 3)
        assert torch.equal(read.eval()(inputs), layer.eval()(inputs))
        twin = copy.deepcopy(read).train()  # here in a world of its own
        assert torch.equal(twin(inputs), nn.BatchNorm1d(3)(inputs))

    run_ranks(2, rank)
