"""State in plain torch form: saved at any point, loaded into plain torch, and back."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

from dearmpi.comm.world import World
from dearmpi.errors import UsageError
from tests.codes import raises
from tests.mpi.oracle import copies, flat_state
from tests.mpi.semantics import (
    SEMANTICS,
    Side,
    adam,
    assert_same_on_both_sides,
    layers,
    outcome,
    train,
)

pytestmark = SEMANTICS


def test_state_at_any_point_of_an_iteration(gather: str, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        seen: dict[str, Tensor] = {}

        def look(where: str) -> None:
            for name, value in outcome(model, optimizer).items():
                seen[f"{where}: {name}"] = value.clone()

        look("at the start")
        for step in range(3):
            optimizer.zero_grad()
            look(f"{step}, before forward")
            loss = side.loss(model, step)
            look(f"{step}, before backward")
            with side.no_sync(optimizer):
                loss.backward()
            look(f"{step}, after a local backward")
            side.loss(model, step + 5).backward()
            look(f"{step}, before step")
            optimizer.step()
            look(f"{step}, after step")
        return seen

    assert_same_on_both_sides(script, world, gather=gather)


@pytest.mark.ranks(2, 3)
def test_state_between_an_eager_backward_and_its_step_is_refused(gather: str, world: World) -> None:
    """Some of it is updated by then, and some not."""
    model = layers()
    side = Side(world, gather=gather, eager=True)
    optimizer = side.wrap(adam(model), model)
    train(side, model, optimizer, 1)
    side.loss(model, 1).backward()
    with raises(UsageError, "step-missing"):
        optimizer.state_dict()
    optimizer.step()
    assert optimizer.state_dict()["state"]
    side.close()


def test_state_goes_to_plain_torch_and_back(gather: str, world: World) -> None:
    """Two steps distributed, two in plain torch on whole batches, and two distributed again."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        train(side, model, optimizer, 2)

        plain = layers()
        plain.load_state_dict(model.state_dict())
        plain_optimizer = adam(plain, lr=0.5)
        plain_optimizer.load_state_dict(optimizer.state_dict())
        train(Side(None), plain, plain_optimizer, 2)

        model.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(plain_optimizer.state_dict())
        train(side, model, optimizer, 2)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


def test_an_optimizer_that_has_state_already_is_taken_over(gather: str, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        plain = adam(model)
        train(Side(None), model, plain, 2)
        optimizer = side.wrap(plain, model)
        train(side, model, optimizer, 2)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


def test_closing_leaves_an_ordinary_model(gather: str, world: World) -> None:
    """What was distributed goes on in one process."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        train(side, model, optimizer, 2)
        state = optimizer.state_dict()
        if side.is_distributed:
            optimizer.close()
        plain = adam(model)
        plain.load_state_dict(state)
        train(Side(None), model, plain, 2)
        assert all(type(module._parameters) is dict for module in model.modules())
        assert not any(module._forward_pre_hooks for module in model.modules())
        return outcome(model, plain)

    assert_same_on_both_sides(script, world, gather=gather)


def test_state_survives_a_file(gather: str, world: World) -> None:
    """``torch.save`` of both state dicts right after a step, as in any training script."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        train(side, model, optimizer, 2)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved: dict[str, Any] = torch.load(file, weights_only=True)
        return {**saved["model"], **flat_state(saved["optimizer"])}

    assert_same_on_both_sides(script, world, gather=gather)


def test_a_loaded_state_is_the_optimizers_own(gather: str, world: World) -> None:
    """Training on does not change the state dict that was taken and loaded."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        train(side, model, optimizer, 2)
        taken = optimizer.state_dict()
        before = copy.deepcopy(taken)
        optimizer.load_state_dict(taken)
        train(side, model, optimizer, 2)
        if side.size > 1:
            for name, value in flat_state(before).items():
                assert torch.equal(value, flat_state(taken)[name]), name
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


def test_state_loaded_into_the_model_between_steps(gather: str, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        start = copies(model)
        train(side, model, optimizer, 2)
        model.load_state_dict(start)
        train(side, model, optimizer, 2)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)
