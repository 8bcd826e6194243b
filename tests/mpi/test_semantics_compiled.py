"""Models that dearmpi's side compiles: the numbers are those of the model that is not compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dearmpi.comm.world import World
from tests.mpi.models import NUM_FEATURES, squared_error
from tests.mpi.oracle import copies
from tests.mpi.semantics import (
    NUM_STEPS,
    ONE_GATHER,
    Side,
    assert_same_on_both_sides,
    gather_by_turns,
    num_unguarded,
    outcome,
    seeded,
    slow_adam,
    train,
    whole_batch,
)

pytestmark = pytest.mark.ranks(2)


class Affine(nn.Linear):
    """torch compiles no layer of its own that is compiled by itself, and does not say so."""

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.linear(inputs, self.weight, self.bias)


class Mixture(nn.Module):
    """Layers, a parameter of its own, and one of a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Affine(NUM_FEATURES, 7)
        self.never_called = nn.Linear(7, 7)
        self.last = Affine(7, 3)
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).tanh() * self.scale
        hidden = functional.linear(hidden, self.never_called.weight)
        outputs: Tensor = self.last(hidden)
        return outputs


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch.compiler.reset()


Compiled = Callable[[nn.Module, str], Any]


def wrap_whole(model: nn.Module, backend: str) -> Any:
    return torch.compile(model, backend=backend)


def compile_in_place(model: nn.Module, backend: str) -> Any:
    model.compile(backend=backend)
    return model


def compile_parts(model: nn.Module, backend: str) -> Any:
    model.get_submodule("first").compile(backend=backend)
    model.get_submodule("last").compile(backend=backend)
    return model


def leave(model: nn.Module, backend: str) -> Any:
    return model


def train_compiled(side: Side, compiled: Compiled, backend: str, *, when: str) -> dict[str, Tensor]:
    model = seeded(Mixture)
    if not side.is_distributed:
        compiled = leave
    used = compiled(model, backend) if when != "after" else model
    if when == "run before":
        side.loss(used, 0)
    optimizer = side.wrap(slow_adam(model), used if when == "before" else model)
    if when == "after":
        used = compiled(model, backend)
    seen = {}
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        side.loss(used, step).backward()
        optimizer.step()
        with torch.no_grad():
            seen[f"evaluation {step}"] = used(whole_batch(9)).clone()
    return {**seen, **copies(model)}


@gather_by_turns(
    "compiled, when",
    (wrap_whole, "before"),
    (wrap_whole, "run before"),
    (compile_in_place, "after"),
    (compile_parts, "before"),
    (compile_parts, "run before"),
)
def test_a_compiled_model(compiled: Compiled, when: str, gather: str, world: World) -> None:
    assert_same_on_both_sides(
        lambda side: train_compiled(side, compiled, "eager", when=when), world, gather=gather
    )


@ONE_GATHER
def test_a_compiled_model_with_compiled_backprop(gather: str, world: World) -> None:
    assert_same_on_both_sides(
        lambda side: train_compiled(side, wrap_whole, "aot_eager", when="after"),
        world,
        gather=gather,
    )


@gather_by_turns("backend", ("eager",), ("aot_eager",))
def test_compiled_parts_updated_during_backprop(backend: str, gather: str, world: World) -> None:
    assert_same_on_both_sides(
        lambda side: train_compiled(side, compile_parts, backend, when="before"),
        world,
        gather=gather,
        eager=True,
    )


@gather_by_turns("is_head_compiled", (False,), (True,))
def test_backprop_compiled_while_a_later_layer_is_updated(
    is_head_compiled: bool, gather: str, world: World
) -> None:
    """The last layer's bucket is under way when torch compiles the backprop of the first: it cannot
    wait for buckets whose gradients only that brings.
    """

    def script(side: Side) -> dict[str, Tensor]:
        model = seeded(lambda: nn.Sequential(Affine(NUM_FEATURES, 7), nn.Tanh(), Affine(7, 3)))
        optimizer = side.wrap(slow_adam(model), model)
        compiled = (model[0], model[2])[: 1 + is_head_compiled]
        for layer in compiled if side.is_distributed else ():
            layer.compile(backend="aot_eager")
        train(side, model, optimizer)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather, eager=True, bucket_cap_mb=1e-6)


@ONE_GATHER
def test_a_compiled_forward_that_is_called_past_the_hooks(gather: str, world: World) -> None:
    """No hook runs, but torch sees that the graph does not hold."""

    def script(side: Side) -> dict[str, Tensor]:
        model = seeded(Mixture)
        optimizer = side.wrap(slow_adam(model), model)
        forward: Callable[[Tensor], Tensor] = model.forward
        if side.is_distributed:
            forward = torch.compile(forward, backend="eager")
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            side.average(squared_error(forward(side.inputs(step)))).backward()
            optimizer.step()
        if side.is_distributed and side.size > 1:
            assert num_unguarded(optimizer)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


@pytest.mark.slow
@ONE_GATHER
def test_a_compiled_model_with_inductor(gather: str, world: World) -> None:
    assert_same_on_both_sides(
        lambda side: train_compiled(side, wrap_whole, "inductor", when="after"),
        world,
        gather=gather,
    )


@pytest.mark.ranks(2, 3)
@ONE_GATHER
def test_the_engine_causes_no_recompilation(gather: str, world: World) -> None:
    """A whole graph, once: nothing of the engine is traced or guarded."""
    graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = seeded(Mixture)
    side = Side(world, gather=gather)
    optimizer = side.wrap(slow_adam(model), model)
    compiled = torch.compile(model, backend=count, fullgraph=True)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        side.loss(compiled, step).backward()
        optimizer.step()
    assert len(graphs) == 1
    side.close()
