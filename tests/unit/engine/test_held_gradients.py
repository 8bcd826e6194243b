"""Gradients on their way into their bucket's buffer, where neighbours are copied together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.engine.bucket.grad_tracker import quiet_slots
from dearmpi.errors import UsageError
from tests.codes import raises
from tests.fakes import FakeHub
from tests.fakes.ranks import run_ranks
from tests.lazy_device import LazyDevice, LazyStream, put_on
from tests.mpi.models import fill
from tests.unit.engine.chain import REDUCE_SCATTERS, operations

SIZE = 2
MIB = 1 << 20


class Tower(nn.Module):
    """Layers that are one bucket; ``forward`` uses those of the given numbers, in that order."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(size))
        fill(self)

    def forward(self, numbers: tuple[int, ...]) -> Tensor:
        values = torch.ones(2, 3)
        for number in numbers:
            values = self.layers[number](values).tanh()
        return values.square().mean()


def distribute(world: World, model: nn.Module) -> DistributedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    return DistributedOptimizer(inner, model, world=world, bucket_cap_mb=100)


def values_of(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def trained_alone(*passes: tuple[int, ...]) -> list[Tensor]:
    model = Tower()
    for numbers in passes:
        model(numbers).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return values_of(model)


def check_as_alone(train: Callable[[Tower, DistributedOptimizer | None], object]) -> None:
    """``train`` and a step make the same of a model on several ranks as alone, without ours."""

    def rank(world: World) -> list[Tensor]:
        model = Tower()
        optimizer = distribute(world, model)
        train(model, optimizer)
        optimizer.step()
        optimizer.close()
        return values_of(model)

    model = Tower()
    train(model, None)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert_close(run_ranks(SIZE, rank), values_of(model))


def assert_close(found: list[list[Tensor]], wanted: list[Tensor]) -> None:
    for values in found:
        for value, other in zip(values, wanted, strict=True):
            torch.testing.assert_close(value, other)


@pytest.mark.parametrize(
    ("nbytes", "quiet"),
    [
        ([10] * 5, {1, 2, 3, 4}),
        ([10, MIB // 2, MIB // 2, 10, 10, 10], {2, 3, 4, 5}),
        ([10, 10, 2 * MIB, 10], {1, 3}),
        ([10], set()),
    ],
)
def test_of_a_mebibyte_of_neighbours_the_lowest_is_waited_for(
    nbytes: list[int], quiet: set[int]
) -> None:
    assert quiet_slots(nbytes, copied_bytes=MIB) == quiet


@pytest.mark.parametrize("numbers", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1), (3, 1), (0,)])
def test_gradients_in_any_order(numbers: tuple[int, ...]) -> None:
    """Layers are numbered in the order in which they stand in their bucket, which is launched once
    all of them have come.
    """
    hub = FakeHub(SIZE)

    def rank(world: World) -> list[Tensor]:
        model = Tower()
        optimizer = distribute(world, model)
        model(numbers).backward()
        for number in numbers:
            with raises(UsageError, "gradient-in-reduction"):
                model.layers[number].weight.grad.sum()
        if len(numbers) == 4:
            deadline = time.monotonic() + 30
            while not operations(hub, world.rank, REDUCE_SCATTERS):
                assert time.monotonic() < deadline, "not launched before the step"
                time.sleep(1e-3)
        optimizer.step()
        optimizer.close()
        return values_of(model)

    assert_close(run_ranks(SIZE, rank, hub=hub), trained_alone(numbers))


def test_gradients_that_first_come_after_a_reduction() -> None:
    """A loss of some layers, whose norm is asked for, and then one of the others."""

    def train(model: Tower, optimizer: DistributedOptimizer | None) -> None:
        model((1,)).backward()
        if optimizer is not None:
            optimizer.clip_grad_norm_(math.inf)
        model((2, 3)).backward()

    check_as_alone(train)


def test_a_layer_of_several_segments_that_backprop_computes_again() -> None:
    """Each is a backprop inside the other, in which the layer's gradient comes once more."""

    def rank(world: World) -> list[Tensor]:
        model = Tower()
        optimizer = distribute(world, model)
        values = torch.ones(2, 3, requires_grad=True)
        for numbers in ((1, 2), (2, 3), (1, 3)):
            for number in numbers:
                values = checkpoint(model.layers[number], values, use_reentrant=True).tanh()
        values.square().mean().backward()
        optimizer.step()
        optimizer.close()
        return values_of(model)

    assert_close(run_ranks(SIZE, rank), trained_alone((1, 2, 2, 3, 1, 3)))


def break_off(model: Tower) -> None:
    """A backprop that fails once layers 3 and 2 have their gradients."""

    def fail(_: Tensor) -> None:
        raise ArithmeticError

    handle = model.layers[1].weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        model((0, 1, 2, 3)).backward()
    handle.remove()


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("numbers", [(0, 1, 2, 3), (0, 1, 2), (0, 1)])
def test_a_backprop_after_one_that_was_broken_off(numbers: tuple[int, ...], clears: bool) -> None:
    """What has come counts, as without the engine, or is dropped by ``model.zero_grad()``."""

    def train(model: Tower, _: DistributedOptimizer | None) -> None:
        break_off(model)
        if clears:
            model.zero_grad()
        model(numbers).backward()

    check_as_alone(train)


def test_a_gradient_of_one_that_was_broken_off_is_not_cleared_by_itself() -> None:
    def rank(world: World) -> None:
        model = Tower()
        optimizer = distribute(world, model)
        break_off(model)
        model.layers[2].zero_grad()
        with raises(UsageError, "gradient-replaced", "layers.2.weight"):
            model((0, 1)).backward()
        optimizer.zero_grad()
        optimizer.close()

    run_ranks(SIZE, rank)


@pytest.mark.parametrize("number", [0, 1])
def test_a_layer_that_is_frozen_while_backprop_comes_to_it(number: int) -> None:
    """Nothing comes for it, though it was expected and autograd calls its hooks."""

    def train(model: Tower, _: DistributedOptimizer | None) -> None:
        def freeze(_: Tensor) -> None:
            model.layers[number].weight.requires_grad = False

        loss = model((0, 1, 2, 3))
        model.layers[2].weight.register_hook(freeze)
        loss.backward()

    check_as_alone(train)


@pytest.mark.parametrize("numbers", [(0, 1, 2, 3), (2, 3)])
def test_gradients_of_one_bucket_that_several_streams_make(
    numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is copied on the stream that makes it, where it is there by then."""
    device = LazyDevice()
    put_on(monkeypatch, device)

    def rank(world: World) -> list[Tensor]:
        model = Tower()

        def make_late(param: Tensor, stream: Any) -> None:
            device._thread.stream = stream
            if stream is not device.host:
                grad = param.grad
                assert grad is not None
                values = grad.clone()
                grad.fill_(float("nan"))
                stream.queue(lambda: grad.copy_(values))

        streams: list[Any] = [device.host, LazyStream(), LazyStream(), LazyStream()]
        for param, stream in zip(model.parameters(), streams, strict=True):
            param.register_post_accumulate_grad_hook(partial(make_late, stream=stream))
        optimizer = distribute(world, model)
        model(numbers).backward()
        device._thread.stream = device.host
        optimizer.step()
        optimizer.synchronize()
        optimizer.close()
        return values_of(model)

    assert_close(run_ranks(SIZE, rank), trained_alone(numbers))
