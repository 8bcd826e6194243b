"""Tensors of a model that share memory, without being one parameter."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import Gather
from dearmpi.errors import ConfigError, UsageError
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill


def two_layers(dtype: torch.dtype) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(dtype)
    fill(model)
    return model


def tied_by_data(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = two_layers(dtype)
    model.get_parameter("2.weight").data = model.get_parameter("0.weight").data
    return model


def with_a_buffer(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = two_layers(dtype)
    model[2].register_buffer("other", model.get_parameter("0.weight").data[1:3])
    return model


def trained(model: nn.Sequential, world: World | None, **settings: Any) -> list[Tensor]:
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if world is not None:
        optimizer = DistributedOptimizer(optimizer, model, world=world, **settings)
    for _ in range(3):
        optimizer.zero_grad()
        model(
            torch.ones(2, 4, dtype=model.get_parameter("0.weight").dtype)
        ).square().mean().backward()
        optimizer.step()
    values = [value.clone() for value in model.state_dict().values()]
    if world is not None:
        optimizer.close()
    return values


Build = Callable[..., nn.Sequential]

BOTH = pytest.mark.parametrize(
    ("build", "names"),
    [(tied_by_data, "2.weight"), (with_a_buffer, "2.other")],
)


@BOTH
@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_they_are_refused_on_several_ranks(build: Build, names: str, gather: str) -> None:
    def rank(world: World) -> None:
        with raises(ConfigError, "parameters-share-memory", names):
            trained(build(), world, gather=gather)

    run_ranks(2, rank)


@pytest.mark.parametrize("build", [tied_by_data, with_a_buffer])
def test_a_rank_alone_trains_them_as_plain_torch_does(build: Build) -> None:
    (alone,) = run_ranks(1, lambda world: trained(build(), world))
    torch.testing.assert_close(alone, trained(build(), None))


@BOTH
@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_a_rank_alone_refuses_them_with_master_copies(
    build: Build, names: str, gather: str
) -> None:
    """Each would have a copy of its own, as on several ranks."""

    def rank(world: World) -> None:
        with raises(ConfigError, "parameters-share-memory", names):
            trained(build(torch.bfloat16), world, master_weights=True, gather=gather)

    run_ranks(1, rank)


def test_a_rank_alone_with_master_copies_leaves_no_shared_memory_unnoticed() -> None:
    def rank(world: World) -> None:
        with raises(ConfigError, "parameters-share-memory", "0.weight", "gather='gradients'"):
            trained(two_layers(torch.bfloat16).share_memory(), world, master_weights=True)

    run_ranks(1, rank)


def test_what_comes_to_share_memory_later_is_refused_and_changes_nothing() -> None:
    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fill(model)
        params = model[0].parameters()
        optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.1), model, world=world)
        for parameter in model[1].parameters():
            parameter.data = model.get_parameter("0.weight").data.view(-1)[: parameter.numel()]
        with raises(ConfigError, "parameters-share-memory"):
            optimizer.add_param_group({"params": list(model[1].parameters())})
        with raises(ConfigError, "parameters-share-memory"):
            optimizer.fuse(1.0)
        assert len(optimizer.param_groups) == 1
        model[0](torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.close()

    run_ranks(2, rank)


def test_neighbours_in_memory_and_one_parameter_in_two_places_are_no_matter() -> None:
    def build() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
        fill(model)
        flat = torch.arange(32.0) / 32
        for number, values in ((0, flat[:16]), (2, flat[16:])):
            model.get_parameter(f"{number}.weight").data = values.view(4, 4)
        model[3].weight = model.get_parameter("0.weight")
        return model

    expected = trained(build(), None)
    for found in run_ranks(2, lambda world: trained(build(), world)):
        torch.testing.assert_close(found, expected)


def test_memory_that_other_processes_see_is_not_left_unnoticed() -> None:
    """As an actor's, which would go on with what the learner began with."""

    def build() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fill(model)
        return model.share_memory()

    def rank(world: World) -> None:
        with raises(ConfigError, "parameters-share-memory", "0.weight", "gather='gradients'"):
            trained(build(), world)
        model = build()
        seen = [param.detach() for param in model.parameters()]
        trained(model, world, gather="gradients")
        for param, view in zip(model.parameters(), seen, strict=True):
            assert torch.equal(param, view)

    run_ranks(2, rank)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("sent", ["model", "state_dict", "share_memory"])
def test_a_model_that_was_sent_to_another_process_is_refused_with_the_cause(
    sent: str, gather: Gather
) -> None:
    """Torch moves what it sends into memory that the other process sees, too."""

    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fill(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = DistributedOptimizer(optimizer, model, world=world, gather=gather)
        model(torch.ones(2, 4)).sum().backward()
        wrapped.step()
        send(copy.deepcopy(model))
        model(torch.ones(2, 4)).sum().backward()
        wrapped.step()
        if sent == "share_memory":
            model.share_memory()
        else:
            send(model if sent == "model" else model.state_dict())
        told = r"0\.weight has moved into memory that is shared .*was sent to.*copy\.deepcopy"
        with pytest.raises(UsageError, match=told):
            model(torch.ones(2, 4)).sum().backward()
        wrapped.close()

    run_ranks(2, rank)


def test_a_model_in_shared_memory_can_be_sent_while_gradients_are_gathered() -> None:
    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fill(model)
        model.share_memory()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = DistributedOptimizer(optimizer, model, world=world, gather="gradients")
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            wrapped.step()
            send(model)
        wrapped.close()

    run_ranks(2, rank)


def send(value: object) -> None:
    """As a queue of torch.multiprocessing does."""
    ForkingPickler(io.BytesIO()).dump(value)
