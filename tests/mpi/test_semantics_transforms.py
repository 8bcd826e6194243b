"""Models that are copied, converted or transformed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from dearmpi.comm.world import World
from dearmpi.errors import UsageError
from tests.codes import raises
from tests.mpi.models import squared_error
from tests.mpi.oracle import BATCH, copies
from tests.mpi.semantics import (
    NUM_STEPS,
    SEMANTICS,
    Side,
    adam,
    assert_same_on_both_sides,
    layers,
    outcome,
    slow_adam,
    train,
    whole_batch,
)

pytestmark = SEMANTICS


def test_a_deep_copy_is_a_model_of_its_own(gather: str, world: World) -> None:
    """It has current values, and training the original does not change it."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(slow_adam(model), model)
        train(side, model, optimizer, 2)
        twin = copy.deepcopy(model)
        train(side, model, optimizer, 2)
        early = copies(twin)
        train(Side(None), twin, adam(twin), 1)  # in plain torch, on whole batches
        return {
            **outcome(model, optimizer),
            **{f"early {name}": value for name, value in early.items()},
            **{f"twin {name}": value for name, value in copies(twin).items()},
        }

    assert_same_on_both_sides(script, world, gather=gather)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "convert",
    [lambda model: model.to(torch.float32), lambda model: model.half()],
    ids=["to", "half"],
)
def test_converting_the_model_after_wrapping_is_refused(
    convert: Callable[[nn.Module], nn.Module], gather: str, world: World
) -> None:
    model = layers()
    side = Side(world, gather=gather)
    optimizer = side.wrap(adam(model), model)
    train(side, model, optimizer, 1)
    convert(model)
    with raises(UsageError, "params-moved"):
        side.loss(model, 0).backward()
    with raises(UsageError, "params-moved"):
        optimizer.step()
    side.close()


@pytest.mark.ranks(2, 3)
def test_converting_the_model_with_gradients_under_way_is_refused(
    gather: str, world: World
) -> None:
    model = layers()
    side = Side(world, gather=gather)
    optimizer = side.wrap(adam(model), model)
    side.loss(model, 0).backward()
    with raises(UsageError, "gradient-in-reduction"):
        model.float()
    world.barrier()
    optimizer.close()


def test_a_conversion_to_the_same_type_changes_nothing(gather: str, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        for _ in range(NUM_STEPS):
            train(side, model, optimizer, 1)
            model.double().to("cpu")
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


@pytest.mark.parametrize("per_sample", [False, True], ids=["grad", "vmap of grad"])
def test_gradients_by_torch_func(per_sample: bool, gather: str, world: World) -> None:
    """They reach ``step()`` through ``param.grad``, and are averaged as others are."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(slow_adam(model), model)

        def loss(params: dict[str, Tensor], inputs: Tensor) -> Any:
            return side.average(squared_error(functional_call(model, params, (inputs,))))

        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            params: dict[str, Tensor] = dict(model.named_parameters())
            inputs = side.inputs(step)
            if per_sample:
                samples = vmap(grad(loss), in_dims=(None, 0))(params, inputs)
                grads = {name: value.sum(0) for name, value in samples.items()}
            else:
                grads = grad(loss)(params, inputs)
            for name, param in model.named_parameters():
                param.grad = grads[name].detach()
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


def test_functional_call_in_an_ordinary_backprop(gather: str, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(slow_adam(model), model)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            halved = {"4.weight": model.get_parameter("4.weight") * 0.5}
            outputs = functional_call(model, halved, (side.inputs(step),))
            side.average(squared_error(outputs)).backward()
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


def test_an_ensemble_by_vmap(gather: str, world: World) -> None:
    """Parameters stacked over models, as ``torch.func.stack_module_state`` does."""

    def script(side: Side) -> dict[str, Tensor]:
        members = [layers(), layers()]
        optimizers = [side.wrap(slow_adam(member), member) for member in members]
        train(side, members[0], optimizers[0], 2)
        params, buffers = torch.func.stack_module_state(members)

        def call(params: Any, buffers: Any, inputs: Tensor) -> Any:
            return functional_call(members[0], (params, buffers), (inputs,))

        outputs = vmap(call, in_dims=(0, 0, None))(params, buffers, whole_batch(3)[:BATCH])
        return {"outputs": outputs.detach().clone(), **copies(members[0])}

    assert_same_on_both_sides(script, world, gather=gather)
