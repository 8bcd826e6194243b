"""Whoever reads parameters through the model right after a step sees that step's."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import ProgressMode
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks
from tests.unit.engine.chain import Chain

NUM_LAYERS = 3


def through_a_file(model: Chain) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return list(torch.load(file, weights_only=True).values())


def through_another_model(model: Chain) -> list[Tensor]:
    other = Chain(NUM_LAYERS)
    other.load_state_dict(model.state_dict())
    return list(other.parameters())


def by_feed_forward(model: Chain) -> list[Tensor]:
    """A matrix comes out of a layer that is fed a unit matrix."""
    return [layer(torch.eye(layer.in_features)).T for layer in layers(model)]


def layers(model: Chain) -> list[Any]:
    return list(model.layers)


READERS: dict[str, Callable[[Chain], Any]] = {
    "state_dict": lambda model: list(model.state_dict().values()),
    "parameters": lambda model: list(model.parameters()),
    "named parameters": lambda model: [param for _, param in model.named_parameters()],
    "attributes": lambda model: [layer.weight for layer in layers(model)],
    "getattr": lambda model: [getattr(layer, "weight") for layer in layers(model)],  # noqa: B009
    "get_parameter": lambda model: [
        model.get_parameter(f"layers.{number}.weight") for number in range(NUM_LAYERS)
    ],
    "deepcopy": lambda model: list(copy.deepcopy(model).parameters()),
    "deepcopy of a layer": lambda model: [copy.deepcopy(layer).weight for layer in layers(model)],
    "file": through_a_file,
    "another model": through_another_model,
    "feed-forward": by_feed_forward,
    "functional call": lambda model: [
        torch.func.functional_call(layer, {}, torch.eye(layer.in_features)).T
        for layer in layers(model)
    ],
    "vector": lambda model: torch.split(
        nn.utils.parameters_to_vector(model.parameters()),
        [layer.weight.numel() for layer in layers(model)],
    ),
}


def train(
    read: Callable[[Chain, DistributedOptimizer], list[Tensor]],
    progress: ProgressMode = "thread",
    **settings: Any,
) -> None:
    """Right after a step, with the network still at work, ``read`` finds what will be there."""
    hub = FakeHub(2, seconds=lambda label, nbytes: 0.004 if label != "AR" else 0.0)

    def rank(world: World) -> None:
        model = Chain(NUM_LAYERS)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5),
            model,
            world=world,
            bucket_cap_mb=1e-6,
            **settings,
        )
        before = [param.detach().clone() for param in model.parameters()]
        for _ in range(2):
            model.backward()
            optimizer.step()
        found = [value.detach().clone().reshape(-1) for value in read(model, optimizer)]
        optimizer.synchronize()
        for one, other, old in zip(found, model.parameters(), before, strict=True):
            torch.testing.assert_close(one, other.detach().reshape(-1))
            assert not torch.allclose(one, old.reshape(-1))
        optimizer.close()

    run_ranks(2, rank, hub=hub, progress=progress)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("reader", READERS)
def test_readers_wait(reader: str, gather: str) -> None:
    train(lambda model, _: READERS[reader](model), gather=gather)


@pytest.mark.parametrize("reader", ["state_dict", "attributes", "feed-forward"])
def test_readers_wait_where_nobody_else_makes_progress(reader: str) -> None:
    train(lambda model, _: READERS[reader](model), progress="poll")


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_references_kept_elsewhere_are_current_after_synchronize(gather: str) -> None:
    def read(model: Chain, optimizer: DistributedOptimizer) -> list[Tensor]:
        optimizer.synchronize()
        return [param for group in optimizer.param_groups for param in group["params"]]

    train(read, gather=gather)


class Itself(nn.Module):
    """A parametrization that changes nothing."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight


def parametrize(layer: nn.Module) -> Callable[[], Tensor]:
    nn.utils.parametrize.register_parametrization(layer, "weight", Itself())
    return lambda: layer.weight  # type: ignore[return-value]


def mask(layer: nn.Module) -> Callable[[], Tensor]:
    prune.identity(layer, "weight")
    return lambda: layer.weight_orig  # type: ignore[return-value]


def take_over(layer: nn.Module) -> Callable[[], Tensor]:
    other, weight = nn.Module(), layer.weight
    del layer.weight
    other.register_parameter("taken", weight)  # type: ignore[arg-type]
    layer.register_module("other", other)
    return lambda: other.taken  # type: ignore[return-value]


@pytest.mark.parametrize("change", [parametrize, mask, take_over])
def test_a_parameter_that_another_module_has_taken_over_is_current(
    change: Callable[[nn.Module], Callable[[], Tensor]],
) -> None:
    hub = FakeHub(2, seconds=lambda label, nbytes: 0.004 if label != "AR" else 0.0)

    def rank(world: World) -> None:
        model = Chain(NUM_LAYERS)
        kept = list(model.parameters())
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5), model, world=world, bucket_cap_mb=1e-6
        )
        model.backward()
        optimizer.step()
        read = change(model.layers[0])  # while its gather is under way
        for _ in range(2):
            found = read().detach().clone()
            optimizer.synchronize()
            assert torch.equal(found, kept[0])
            optimizer.zero_grad()
            sum(param.sum() for param in kept).backward()  # type: ignore[union-attr]
            optimizer.step()
        optimizer.close()

    run_ranks(2, rank, hub=hub)


def test_a_copy_is_an_ordinary_model() -> None:
    """It takes no part in communication, and does not change when the original trains on."""

    def rank(world: World) -> None:
        model = Chain(NUM_LAYERS)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5), model, world=world
        )
        model.backward()
        optimizer.step()
        twin = copy.deepcopy(model)
        values = [param.detach().clone() for param in twin.parameters()]
        model.backward()
        optimizer.step()
        twin.backward()
        for param, value in zip(twin.parameters(), values, strict=True):
            assert torch.equal(param, value)
            assert type(param.grad) is Tensor
        assert all(type(module._parameters) is dict for module in twin.modules())
        optimizer.close()

    run_ranks(2, rank)


def test_a_copy_or_a_file_of_a_model_keeps_nothing_of_the_engine(tmp_path: Path) -> None:
    """Else an average of weights would hold the buffers of every layout there has been."""

    def rank(world: World) -> tuple[nn.Module, nn.Module]:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5), model, world=world
        )
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        twin = copy.deepcopy(model)
        path = tmp_path / f"{world.rank}.pt"
        torch.save(model, path)
        engine = weakref.ref(optimizer._built.engine)
        optimizer.fuse(0.001)
        gc.collect()
        assert engine() is None
        loaded: nn.Module = torch.load(path, weights_only=False)
        for one, other in zip(twin.parameters(), loaded.parameters(), strict=True):
            assert torch.equal(one, other)
        optimizer.close()
        return twin, loaded

    for models in run_ranks(2, rank):
        for model in models:
            model(torch.ones(1, 3)).sum().backward()


def test_an_evaluation_in_inference_mode_spoils_no_update_that_it_waits_for() -> None:
    """Without a thread of its own the engine updates in whatever mode the one that waits is in."""

    def rank(world: World) -> list[float]:
        model = nn.Linear(3, 2)
        nn.init.constant_(model.weight, 0.5)
        nn.init.constant_(model.bias, 0.5)
        optimizer = DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.1), model, world=world
        )
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            with torch.inference_mode(step == 0):
                model(torch.ones(1, 3))
        optimizer.synchronize()
        values: list[float] = model.bias.tolist()
        optimizer.close()
        return values

    def slow() -> FakeHub:
        return FakeHub(2, seconds=lambda label, nbytes: 0.004 if label != "AR" else 0.0)

    polled = run_ranks(2, rank, hub=slow(), progress="poll")
    assert polled == run_ranks(2, rank, hub=slow(), progress="thread")
