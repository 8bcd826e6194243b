"""Blocks of a model that are compiled one by one, by dearmpi's side alone: the numbers are those of
the model that is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi.comm.world import World
from tests.mpi.models import NUM_FEATURES, squared_error
from tests.mpi.semantics import (
    NUM_STEPS,
    ONE_GATHER,
    Side,
    assert_all_guarded,
    assert_same_on_both_sides,
    outcome,
    seeded,
    slow_adam,
    train,
)

pytestmark = pytest.mark.ranks(2)


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch.compiler.reset()


class Block(nn.Module):
    """One of several that torch compiles once for all."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(num_features)
        self.linear = nn.Linear(num_features, num_features)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = inputs + self.linear(self.norm(inputs)).tanh()
        return outputs


class BrokenBlock(Block):
    """torch compiles it in two parts."""

    def forward(self, inputs: Tensor) -> Tensor:
        normed = self.norm(inputs)
        torch._dynamo.graph_break()
        outputs: Tensor = inputs + self.linear(normed).tanh()
        return outputs


def blocks(kind: type[Block] = Block) -> nn.Sequential:
    """A stack of compiled blocks between two layers that are not."""
    model: nn.Sequential = seeded(
        lambda: nn.Sequential(
            nn.Linear(NUM_FEATURES, 9), *(kind(9) for _ in range(4)), nn.Linear(9, 3)
        )
    )
    return model


def in_place(block: nn.Module, backend: str = "aot_eager") -> nn.Module:
    block.compile(backend=backend)
    return block


def wrapped(block: nn.Module, backend: str = "aot_eager") -> Any:
    return torch.compile(block, backend=backend)


# Each two values meet in those that are not slow.
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("compiled", "kind", "eager", "gather"),
    [
        (in_place, Block, False, "parameters"),
        (in_place, BrokenBlock, True, "gradients"),
        (wrapped, Block, True, "parameters"),
        (wrapped, BrokenBlock, False, "gradients"),
        pytest.param(in_place, Block, True, "gradients", marks=pytest.mark.slow),
        pytest.param(in_place, BrokenBlock, False, "parameters", marks=pytest.mark.slow),
        pytest.param(wrapped, Block, False, "gradients", marks=pytest.mark.slow),
        pytest.param(wrapped, BrokenBlock, True, "parameters", marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_wait_for_their_own_parameters_only(
    compiled: Callable[[nn.Module, str], Any],
    kind: type[Block],
    eager: bool,
    gather: str,
    world: World,
) -> None:
    """With batches of several sizes, for which torch compiles anew."""

    # Backprop is compiled as well where updates run beside it.
    backend = "aot_eager" if eager else "eager"

    def script(side: Side) -> dict[str, Tensor]:
        model = blocks(kind)
        optimizer = side.wrap(slow_adam(model), model)
        for number in range(1, 5) if side.is_distributed else ():
            model[number] = compiled(model[number], backend)
        for step in range(NUM_STEPS):
            rows = side.inputs(step).repeat(1 + step // 2, 1)
            optimizer.zero_grad()
            side.average(squared_error(model(rows))).backward()
            optimizer.step()
        if side.is_distributed and side.size > 1:
            assert_all_guarded(optimizer)
        found = outcome(model, optimizer)
        return {name.replace("_orig_mod.", ""): value for name, value in found.items()}

    assert_same_on_both_sides(script, world, gather=gather, eager=eager)


@ONE_GATHER
def test_compiled_blocks_in_other_buckets(gather: str, world: World) -> None:
    """What torch has compiled before the buckets changed waits for the new ones, too."""

    def script(side: Side) -> dict[str, Tensor]:
        model = blocks()
        for number in range(1, 5) if side.is_distributed else ():
            in_place(model[number])
        side.loss(model, 0)
        optimizer = side.wrap(slow_adam(model), model)
        train(side, model, optimizer)
        if side.is_distributed:
            optimizer.fuse(0.001)
        train(side, model, optimizer)
        if side.is_distributed and side.size > 1:
            assert_all_guarded(optimizer)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


@ONE_GATHER
def test_compiled_blocks_after_a_reset(gather: str, world: World) -> None:
    """torch forgets whom it tells of what it compiles, until the next step. An optimizer that steps
    while torch traces would round its scalars.
    """

    def script(side: Side) -> dict[str, Tensor]:
        model = blocks()
        optimizer = side.wrap(slow_adam(model), model)
        for number in range(1, 5) if side.is_distributed else ():
            in_place(model[number])
        train(side, model, optimizer)
        torch.compiler.reset()
        if side.is_distributed:
            optimizer.synchronize()
        train(side, model, optimizer)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            rows = side.inputs(step).repeat(2 + step, 1)
            side.average(squared_error(model(rows))).backward()
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


@ONE_GATHER
def test_compiled_blocks_beside_a_teacher_of_the_same_code(gather: str, world: World) -> None:
    """For which torch has compiled it first."""

    def script(side: Side) -> dict[str, Tensor]:
        model, teacher = blocks(), blocks()
        teacher.requires_grad_(False)
        optimizer = side.wrap(slow_adam(model), model)
        for number in range(1, 5) if side.is_distributed else ():
            in_place(model[number])
            in_place(teacher[number])
        for step in range(NUM_STEPS):
            rows = side.inputs(step)
            hint = teacher(rows)
            optimizer.zero_grad()
            side.average((model(rows) - hint - 1).square().sum()).backward()
            optimizer.step()
        if side.is_distributed and side.size > 1:
            assert_all_guarded(optimizer)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


@ONE_GATHER
def test_compiled_blocks_are_compiled_once(gather: str, world: World) -> None:
    compiled_graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled_graphs.append(graph)
        return graph.forward

    model = blocks()
    side = Side(world, gather=gather)
    optimizer = side.wrap(slow_adam(model), model)
    for number in range(1, 5):
        model[number].compile(backend=count, fullgraph=True)
    numbers = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        side.loss(model, step).backward()
        optimizer.step()
        numbers.append(len(compiled_graphs))
    assert numbers == [numbers[0]] * NUM_STEPS
    side.close()


class Reader(nn.Module):
    """Calls a layer that is no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(9)

    def forward(self, inputs: Tensor, layer: nn.Module) -> Tensor:
        outputs: Tensor = self.norm(layer(inputs))
        return outputs


class Lender(nn.Module):
    """Has a compiled part read another, which nothing else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader()
        self.lent = nn.Linear(NUM_FEATURES, 9)
        self.last = nn.Linear(9, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.reader(inputs, self.lent))
        return outputs


@ONE_GATHER
def test_a_compiled_block_that_reads_what_is_no_part_of_it(gather: str, world: World) -> None:
    """For more steps than torch compiles anything anew, before it gives up."""

    def script(side: Side) -> dict[str, Tensor]:
        model = seeded(Lender)
        optimizer = side.wrap(slow_adam(model), model)
        if side.is_distributed:
            model.reader.compile(backend="eager", fullgraph=True)
        train(side, model, optimizer, num_steps=12)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)
