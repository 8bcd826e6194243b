"""Models that are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dearmpi import GradScaler
from dearmpi.comm.world import World
from tests.mpi.models import NUM_FEATURES, squared_error
from tests.mpi.oracle import copies
from tests.mpi.semantics import (
    NUM_STEPS,
    SEMANTICS,
    Side,
    assert_same_on_both_sides,
    layers,
    outcome,
    seeded,
    slow_adam,
    train,
    whole_batch,
)

pytestmark = SEMANTICS


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


def train_compiled(side: Side, compiled: Compiled, backend: str, *, when: str) -> dict[str, Tensor]:
    model = seeded(Mixture)
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


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("compiled", "when"),
    [
        (wrap_whole, "before"),
        (wrap_whole, "run before"),
        (compile_in_place, "after"),
        (compile_parts, "before"),
        (compile_parts, "run before"),
    ],
)
def test_a_compiled_model(compiled: Compiled, when: str, gather: str, world: World) -> None:
    assert_same_on_both_sides(
        lambda side: train_compiled(side, compiled, "eager", when=when), world, gather=gather
    )


@pytest.mark.ranks(2)
def test_a_compiled_model_with_compiled_backprop(gather: str, world: World) -> None:
    assert_same_on_both_sides(
        lambda side: train_compiled(side, wrap_whole, "aot_eager", when="after"),
        world,
        gather=gather,
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_parts_updated_during_backprop(backend: str, gather: str, world: World) -> None:
    assert_same_on_both_sides(
        lambda side: train_compiled(side, compile_parts, backend, when="before"),
        world,
        gather=gather,
        eager=True,
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_head_compiled", [False, True])
def test_backprop_compiled_while_a_later_layer_is_updated(
    is_head_compiled: bool, gather: str, world: World
) -> None:
    """The last layer's bucket is under way when torch compiles the backprop of the first: it cannot
    wait for buckets whose gradients only that brings.
    """

    def script(side: Side) -> dict[str, Tensor]:
        torch.compiler.reset()  # what the other side has compiled
        model = seeded(lambda: nn.Sequential(Affine(NUM_FEATURES, 7), nn.Tanh(), Affine(7, 3)))
        optimizer = side.wrap(slow_adam(model), model)
        for layer in (model[0], model[2])[: 1 + is_head_compiled]:
            layer.compile(backend="aot_eager")
        train(side, model, optimizer)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather, eager=True, bucket_cap_mb=1e-6)


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


def unguarded(optimizer: Any) -> int:
    """Buckets that ``step`` waits for."""
    return sum(bucket.unguarded for bucket in optimizer._assembly.engine._buckets)


def in_place(block: nn.Module) -> nn.Module:
    block.compile(backend="aot_eager")
    return block


def wrapped(block: nn.Module) -> Any:
    return torch.compile(block, backend="aot_eager")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("compiled", [in_place, wrapped])
@pytest.mark.parametrize("kind", [Block, BrokenBlock])
@pytest.mark.parametrize("eager", [False, True])
def test_compiled_blocks_wait_for_their_own_parameters_only(
    compiled: Callable[[nn.Module], Any], kind: type[Block], eager: bool, gather: str, world: World
) -> None:
    """With batches of several sizes, for which torch compiles anew."""

    def script(side: Side) -> dict[str, Tensor]:
        torch.compiler.reset()  # what the other side has compiled
        model = blocks(kind)
        optimizer = side.wrap(slow_adam(model), model)
        for number in range(1, 5):
            model[number] = compiled(model[number])
        for step in range(NUM_STEPS):
            rows = side.inputs(step).repeat(1 + step // 2, 1)
            optimizer.zero_grad()
            side.average(squared_error(model(rows))).backward()
            optimizer.step()
        if side.is_distributed and side.size > 1:
            assert not unguarded(optimizer)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather, eager=eager)


@pytest.mark.ranks(2)
def test_compiled_blocks_in_other_buckets(gather: str, world: World) -> None:
    """What torch has compiled before the buckets changed waits for the new ones, too."""

    def script(side: Side) -> dict[str, Tensor]:
        torch.compiler.reset()
        model = blocks()
        for number in range(1, 5):
            in_place(model[number])
        side.loss(model, 0)
        optimizer = side.wrap(slow_adam(model), model)
        train(side, model, optimizer)
        if side.is_distributed:
            optimizer.fuse(0.001)
        train(side, model, optimizer)
        if side.is_distributed and side.size > 1:
            assert not unguarded(optimizer)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


@pytest.mark.ranks(2)
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


@pytest.mark.ranks(2)
def test_a_compiled_function_without_parameters_makes_nobody_wait(
    gather: str, world: World
) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        torch.compiler.reset()
        model = layers()
        optimizer = side.wrap(slow_adam(model), model)
        loss = torch.compile(squared_error, backend="eager")
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            side.average(loss(model(side.inputs(step)))).backward()
            optimizer.step()
        if side.is_distributed and side.size > 1:
            assert not unguarded(optimizer)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


@pytest.mark.ranks(2)
def test_a_compiled_forward_that_is_called_past_the_hooks(gather: str, world: World) -> None:
    """No hook runs, but torch sees that the graph does not hold."""

    def script(side: Side) -> dict[str, Tensor]:
        torch.compiler.reset()
        model = seeded(Mixture)
        optimizer = side.wrap(slow_adam(model), model)
        forward: Callable[[Tensor], Tensor] = torch.compile(model.forward, backend="eager")
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            side.average(squared_error(forward(side.inputs(step)))).backward()
            optimizer.step()
        if side.is_distributed and side.size > 1:
            assert unguarded(optimizer)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_a_compiled_model_with_inductor(gather: str, world: World) -> None:
    assert_same_on_both_sides(
        lambda side: train_compiled(side, wrap_whole, "inductor", when="after"),
        world,
        gather=gather,
    )


@pytest.mark.ranks(2)
def test_a_compiled_function_of_parameters(gather: str, world: World) -> None:
    """No module is called, so no hook runs."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(slow_adam(model), model)

        @torch.compile(backend="eager")
        def apply(inputs: Tensor) -> Tensor:
            hidden = functional.linear(inputs, model[0].weight)  # type: ignore[arg-type]
            return functional.linear(hidden.tanh(), model[2].weight)  # type: ignore[arg-type]

        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            side.average(squared_error(apply(side.inputs(step)))).backward()
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


def step_alone(side: Side, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    side.loss(model, step).backward()
    compiled_by(side, optimizer.step)()


def backward_alone(side: Side, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    compiled_by(side, lambda: side.loss(model, step).backward())()
    optimizer.step()


def whole_iteration(side: Side, model: nn.Module, optimizer: Any, step: int) -> None:
    def iterate() -> None:
        optimizer.zero_grad()
        side.loss(model, step).backward()
        side.clip(optimizer, model, 0.5)
        optimizer.step()

    compiled_by(side, iterate)()


def scaled_iteration(side: Side, model: nn.Module, optimizer: Any, step: int) -> None:
    scaler = (GradScaler if side.is_distributed else torch.amp.GradScaler)("cpu", init_scale=16.0)

    def iterate() -> None:
        optimizer.zero_grad()
        scaler.scale(side.loss(model, step)).backward()
        scaler.step(optimizer)

    compiled_by(side, iterate)()


def compiled_by(side: Side, function: Callable[[], Any]) -> Callable[[], Any]:
    """Compiled by dearmpi's side only: a step that torch compiles has its scalars in fp32."""
    return torch.compile(function, backend="eager") if side.is_distributed else function


@pytest.mark.ranks(2)
@pytest.mark.parametrize("iterate", [step_alone, backward_alone, whole_iteration, scaled_iteration])
def test_a_compiled_function_that_runs_a_backward_or_steps(
    iterate: Callable[[Side, nn.Module, Any, int], None], gather: str, world: World
) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(slow_adam(model), model)
        for step in range(NUM_STEPS):
            iterate(side, model, optimizer, step)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


class CompiledDescent(torch.optim.Optimizer):
    """Its arithmetic is compiled, as that of many an optimizer is, and anew for every rate."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.descend = torch.compile(_descend, backend="eager", dynamic=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.descend(param, param.grad, group["lr"])


def _descend(param: Tensor, grad: Tensor, lr: float) -> None:
    param.add_(grad, alpha=-lr)


@pytest.mark.ranks(2, 3)
def test_an_optimizer_whose_arithmetic_is_compiled(gather: str, world: World) -> None:
    """It is compiled where updates run, which must not wait for parameters there; and no later step
    waits for its gathers.
    """

    def script(side: Side) -> dict[str, Tensor]:
        torch.compiler.reset()  # what the other side has compiled
        model = layers()
        optimizer = side.wrap(CompiledDescent(model.parameters(), lr=0.1), model)
        for step in range(NUM_STEPS):
            optimizer.param_groups[0]["lr"] *= 0.7
            optimizer.zero_grad()
            side.loss(model, step).backward()
            optimizer.step()
        if side.is_distributed and side.size > 1:
            assert not unguarded(optimizer)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


@pytest.mark.ranks(2, 3)
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
