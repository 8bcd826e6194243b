"""A model's buffers in any layout are rank 0's on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError, MismatchError
from tests.codes import raises
from tests.fakes.ranks import run_ranks

MAKERS: dict[str, Callable[[float], Tensor]] = {
    "coo": lambda value: (torch.eye(4) * value).to_sparse(),
    "csr": lambda value: (torch.eye(4) * value).to_sparse_csr(),
    "expanded": lambda value: torch.tensor([value, 2.0, 3.0]).expand(4, 3),
    "expanded number": lambda value: torch.tensor(value).expand(2),
    "transposed": lambda value: (torch.arange(12.0).view(3, 4) * value).t(),
}


def build(buffer: Tensor) -> Any:
    """A layer that is trained, with ``buffer`` beside."""
    model = nn.Linear(3, 2)
    model.register_buffer("mask", buffer)
    return model


def assert_free(inner: torch.optim.Optimizer, model: nn.Module, world: World) -> None:
    """Nothing of an optimizer that was refused is left, and the cure works."""
    assert not model._forward_pre_hooks
    del model.mask
    optimizer = DistributedOptimizer(inner, model, world=world)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.close()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("how", ["keep", "broadcast", "average"])
@pytest.mark.parametrize("layout", MAKERS)
@pytest.mark.parametrize("size", [1, 2])
def test_buffers_of_any_layout_are_sent(size: int, layout: str, how: Any) -> None:
    """Such as a graph's adjacency, or a mask that is expanded."""

    def rank(world: World) -> Tensor:
        model: Any = build(MAKERS[layout](1.0 if world.is_root else 5.0))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world, buffers=how)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.close()
        found: Tensor = model.mask.to_dense()
        return found

    for found in run_ranks(size, rank):
        assert torch.equal(found, MAKERS[layout](1.0).to_dense())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", MAKERS)
def test_so_are_parameters_that_are_not_trained(layout: str) -> None:
    def rank(world: World) -> Tensor:
        model: Any = nn.Linear(3, 2)
        value = MAKERS[layout](1.0 if world.is_root else 5.0)
        model.mask = nn.Parameter(value, requires_grad=False)
        inner = torch.optim.SGD([model.weight, model.bias], lr=0.1)
        optimizer = DistributedOptimizer(inner, model, world=world)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.close()
        found: Tensor = model.mask.detach().to_dense()
        return found

    for found in run_ranks(2, rank):
        assert torch.equal(found, MAKERS[layout](1.0).to_dense())


def test_a_sparse_parameter_under_the_optimizer_is_refused_by_name() -> None:
    def rank(world: World) -> None:
        model: Any = nn.Linear(3, 2)
        model.mask = nn.Parameter(torch.eye(4).to_sparse())
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        said = r"parameter mask is of the layout torch.sparse_coo.*keep it dense"
        with pytest.raises(ConfigError, match=said):
            DistributedOptimizer(inner, model, world=world)

    run_ranks(2, rank)


def test_sparse_buffers_that_differ_in_size_are_named() -> None:
    def rank(world: World) -> None:
        model = build(torch.eye(4)[: 3 + world.rank].to_sparse())
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        said = r"rank 1 .*buffer mask of shape \(4, 4\) .*sparse.* rank 0.* mask of shape \(3, 4\)"
        with pytest.raises(MismatchError, match=said):
            DistributedOptimizer(inner, model, world=world)
        assert_free(inner, model, world)

    run_ranks(2, rank)


@pytest.mark.filterwarnings("ignore:Sparse CSC tensor support")
def test_a_buffer_that_cannot_be_sent_is_named() -> None:
    def rank(world: World) -> None:
        model = build(torch.eye(4).to_sparse_csc())
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        inner.state[model.weight]["momentum_buffer"] = torch.ones(2, 3)
        with raises(ConfigError, "tensor-not-served", "torch.sparse_csc"):
            DistributedOptimizer(inner, model, world=world)
        assert "momentum_buffer" in inner.state[model.weight]
        assert_free(inner, model, world)

    run_ranks(2, rank)
