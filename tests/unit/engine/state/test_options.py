"""Options and state that differ between ranks are named before training begins."""

from __future__ import annotations

import math
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.engine.state.options import find_changed_option
from dearmpi.engine.update.update import read_options
from dearmpi.errors import MismatchError, UsageError
from tests.codes import raises
from tests.fakes import FakeClock, FakeHub
from tests.fakes.ranks import run_ranks
from tests.unit.engine.chain import Chain


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [1, 2])
def test_a_scheduler_of_the_wrapped_optimizer_sees_that_steps_are_taken(size: int) -> None:
    """It would warn that it is called before them."""

    def rank(world: World) -> None:
        model = Chain(2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
        optimizer = DistributedOptimizer(inner, model, world=world)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.close()

    run_ranks(size, rank)


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("lr", (0.1, 0.2), "lr 0.2 in param group 1 where rank 0's has lr 0.1 in param group 1"),
        ("lr", (torch.tensor(0.5), torch.tensor(1.0)), "lr 1 in .* has lr 0.5 in"),
        ("momentum", (0.9, math.nan), "momentum nan in .* has momentum 0.9 in"),
        ("nesterov", (False, True), "nesterov True in .* has nesterov False in"),
        ("marks", ([0.5, (1, None)], [0.5, (2, None)]), r"marks \(0.5, \(2, None\)\) in"),
    ],
)
def test_another_option_on_one_rank_is_named_on_all_with_both_values(
    name: str, values: tuple[Any, Any], told: str
) -> None:
    """Each rank would update its shards by its own, without a word."""

    def rank(world: World) -> str:
        model = Chain(2)
        weight, *others = model.parameters()
        groups = [{"params": [weight]}, {"params": others, name: values[world.rank == 1]}]
        with pytest.raises(MismatchError) as caught:
            DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), model, world=world)
        return str(caught.value)

    messages = run_ranks(3, rank)
    assert len(set(messages)) == 1
    start = "rank 1 on .* has another optimizer option than rank 0 on .*: its optimizer has "
    assert re.search(start + told, messages[0])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (math.nan, -math.nan),
        (1, np.float32(1.0)),
        (torch.tensor(0.5, dtype=torch.float64), 0.5),
        ((0.9, 10**400), [0.9, 10**400]),
        (lambda: 1, lambda: 2),
        ({"a": 1}, {"a": 2}),
        (object(), object()),
    ],
)
def test_options_that_are_equal_or_no_values_are_accepted(one: Any, other: Any) -> None:
    def rank(world: World) -> None:
        model = Chain(2)
        group = {"params": list(model.parameters()), "mark": one if world.is_root else other}
        DistributedOptimizer(torch.optim.SGD([group], lr=0.1), model, world=world).close()

    run_ranks(2, rank)


def trained(model: Chain, num_steps: int) -> torch.optim.Optimizer:
    """Adam after so many steps in plain torch."""
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(num_steps):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("num_steps", "told"),
    [
        ((3, 0), r"nothing further where rank 0's has step 3 of layers\.0\.weight"),
        ((0, 3), r"step 3 of layers\.0\.weight where rank 0's has nothing further"),
        ((3, 2), r"step 2 of layers\.0\.weight where rank 0's has step 3 of"),
    ],
    ids=["rank 0 alone has loaded", "rank 0 has not", "another checkpoint"],
)
def test_state_that_one_rank_lacks_is_named(num_steps: tuple[int, int], told: str) -> None:
    """As with a script that loads on rank 0 and used to broadcast."""

    def rank(world: World) -> str:
        model = Chain(2)
        optimizer = trained(model, num_steps[world.rank])
        with pytest.raises(MismatchError) as caught:
            DistributedOptimizer(optimizer, model, world=world)
        return str(caught.value)

    (message, *others) = run_ranks(2, rank)
    assert others == [message]
    assert re.search(
        "rank 1 on .* has another optimizer state than rank 0 on .*: its optimizer has " + told,
        message,
    )


def test_state_that_all_ranks_have_is_taken() -> None:
    def rank(world: World) -> float:
        model = Chain(2)
        optimizer = DistributedOptimizer(trained(model, 3), model, world=world)
        steps = [float(entries["step"]) for entries in optimizer.state_dict()["state"].values()]
        optimizer.close()
        return min(steps)

    assert run_ranks(2, rank) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("before", "now", "differ"),
    [
        (torch.tensor(math.nan), torch.tensor(math.nan), False),
        (math.nan, float("nan"), False),
        ((0.9, 0.99), [0.9, 0.99], False),
        ([torch.ones(2)], [torch.ones(2)], False),
        (torch.ones(2), torch.zeros(2), True),
        ((0.9, 0.99), (0.9, 0.999), True),
        (0.1, torch.ones(2), True),
        (np.zeros(2), np.ones(2), True),
    ],
)
def test_options_set_after_backward_are_told_from_those_that_are_as_before(
    before: Any, now: Any, differ: bool
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    optimizer.param_groups[0]["mark"] = before
    earlier = read_options(optimizer)
    optimizer.param_groups[0]["mark"] = now
    assert find_changed_option(earlier, optimizer) == ("mark in param group 0" if differ else "")


class Scaled(torch.optim.SGD):
    """Looks at the first of several scales."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.mul_(group["scales"][0])
        return super().step(closure)


def set_in_place(group: Any, scale: float) -> None:
    """Change the first scale, be it a number in a list or a tensor in a tuple."""
    if isinstance(group["scales"], list):
        group["scales"][0] = scale
    else:
        group["scales"][0].fill_(scale)


SCALES = pytest.mark.parametrize(
    "make_scales", [lambda: [1.0, 2.0], lambda: (torch.tensor(1.0),)], ids=["list", "tuple"]
)


@SCALES
def test_options_changed_in_place_after_a_step_do_not_change_it(make_scales: Any) -> None:
    """The step is under way still: nothing has been reduced."""
    clock, released = FakeClock(), threading.Event()

    def seconds(label: str, nbytes: int) -> float:
        return 10.0 if label.startswith("RS") and not released.is_set() else 0.0

    def rank(world: World) -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        group = {"params": list(model.parameters()), "scales": make_scales()}
        inner = Scaled([group], lr=1.0)
        optimizer = DistributedOptimizer(inner, model, world=world)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        set_in_place(optimizer.param_groups[0], 0.0)
        world.barrier()
        if world.is_root:
            released.set()
            clock.advance(10.0)
        optimizer.close()
        return model.weight.item()

    hub = FakeHub(2, clock=clock.now, seconds=seconds)
    assert run_ranks(2, rank, hub=hub) == [-1.0, -1.0]


@SCALES
def test_eager_options_changed_in_place_are_not_set_too_late(make_scales: Any) -> None:
    def rank(world: World) -> None:
        model = torch.nn.Linear(1, 1, bias=False)
        group = {"params": list(model.parameters()), "scales": make_scales()}
        optimizer = DistributedOptimizer(Scaled([group], lr=1.0), model, world=world, eager=True)
        model(torch.ones(1, 1)).sum().backward()
        set_in_place(optimizer.param_groups[0], 0.5)
        with raises(UsageError, "eager-forbids", "group 0", "scales"):
            optimizer.step()
        set_in_place(optimizer.param_groups[0], 1.0)
        optimizer.step()
        optimizer.close()

    run_ranks(2, rank)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_state_of_another_dtype_is_named(odd: int) -> None:
    """Each rank's part of it would be of its own width where it is gathered."""

    def rank(world: World) -> str:
        model = Chain(1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for param in model.parameters():
            dtype = torch.float64 if world.rank == odd else torch.float32
            inner.state[param]["momentum_buffer"] = torch.zeros(param.shape, dtype=dtype)
        with pytest.raises(MismatchError) as caught:
            DistributedOptimizer(inner, model, world=world)
        return str(caught.value)

    said = run_ranks(2, rank)
    assert said[0] == said[1]
    assert "and float64 with " in said[0] and "and float32 with " in said[0]
