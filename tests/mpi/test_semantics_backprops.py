"""Forwards, backprops and steps in other orders than one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.config import Gather
from dearmpi.errors import ConfigError, UsageError
from tests.codes import raises
from tests.mpi.models import NUM_FEATURES
from tests.mpi.semantics import (
    SEMANTICS,
    Side,
    adam,
    assert_same_on_both_sides,
    layers,
    outcome,
    seeded,
    train,
    whole_batch,
)

pytestmark = SEMANTICS


def test_a_second_forward_does_not_repeat_the_update(gather: Gather, world: World) -> None:
    """Nor does an evaluation between steps, without ``no_grad``."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        seen = {}
        for step in range(4):
            train(side, model, optimizer, 1)
            seen[f"evaluation {step}"] = model(whole_batch(9)).detach().clone()
            seen[f"again {step}"] = model(whole_batch(9)).detach().clone()
        return {**seen, **outcome(model, optimizer)}

    assert_same_on_both_sides(script, world, gather=gather)


def test_two_forwards_before_one_backward(gather: Gather, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        for step in range(4):
            optimizer.zero_grad()
            (side.loss(model, step) + side.loss(model, step + 10)).backward()
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


@pytest.mark.parametrize("local", [True, False], ids=["with no_sync", "without no_sync"])
def test_two_backwards_before_one_step(local: bool, gather: Gather, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        for step in range(4):
            optimizer.zero_grad()
            if local:
                with side.no_sync(optimizer):
                    side.loss(model, step).backward()
            else:
                side.loss(model, step).backward()
            side.loss(model, step + 10).backward()
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


def test_no_sync_after_a_synchronizing_backprop_is_refused(gather: Gather, world: World) -> None:
    if world.size == 1:
        pytest.skip("gradients of one rank are always local")
    model = layers()
    side = Side(world, gather=gather)
    optimizer = side.wrap(adam(model), model)
    side.loss(model, 0).backward()
    with optimizer.no_sync(), raises(UsageError, "no-sync-misplaced", "no_sync"):
        side.loss(model, 1).backward()
    optimizer.zero_grad()
    side.close()


def test_a_backward_of_a_part_of_the_model_before_one_of_the_rest(
    gather: Gather, world: World
) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        for step in range(4):
            optimizer.zero_grad()
            side.loss(model[:3], step).backward()
            side.loss(model, step).backward()
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


def test_a_step_without_backward(gather: Gather, world: World) -> None:
    """Nothing has a gradient, so nothing changes, not even by weight decay."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(torch.optim.AdamW(model.parameters(), lr=0.01), model)
        optimizer.step()
        train(side, model, optimizer, 2)
        optimizer.zero_grad()
        optimizer.step()
        train(side, model, optimizer, 1)
        optimizer.zero_grad()
        optimizer.step()
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


def test_a_backward_without_step_is_dropped_by_zero_grad(gather: Gather, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        for step in range(5):
            optimizer.zero_grad()
            side.loss(model, step).backward()
            if step % 2 == 0:
                optimizer.step()
        optimizer.zero_grad()
        train(side, model, optimizer, 1)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


def test_gradients_cleared_behind_the_optimizers_back_are_refused(
    gather: Gather, world: World
) -> None:
    if world.size == 1:
        pytest.skip("gradients of one rank are always its own")
    model = layers()
    side = Side(world, gather=gather)
    optimizer = side.wrap(adam(model), model)
    side.loss(model, 0).backward()
    model.zero_grad()
    with raises(UsageError, "gradient-replaced", "optimizer.zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    side.close()


def test_retain_graph(gather: Gather, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        for step in range(4):
            optimizer.zero_grad()
            loss = side.loss(model, step)
            loss.backward(retain_graph=True)
            torch.autograd.backward(loss)
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


class Checkpointed(nn.Module):
    """Recomputes its layers in backprop, one of them in two segments."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, 6)
        self.second = nn.Linear(6, 6)
        self.shared = nn.Linear(6, 6)
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs)
        for layer in (self.shared, self.second, self.shared):
            hidden = checkpoint(self._block, layer, hidden, use_reentrant=self.reentrant)
        return hidden

    def _block(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        outputs: Tensor = layer(hidden).tanh()
        return outputs


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_activation_checkpointing(reentrant: bool, gather: Gather, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = seeded(lambda: Checkpointed(reentrant=reentrant))
        optimizer = side.wrap(adam(model), model)
        train(side, model, optimizer)
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


def test_a_closure_given_to_step(gather: Gather, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = side.loss(model, 0)
            torch.autograd.backward(loss)
            return loss

        losses = [optimizer.step(closure).item() for _ in range(4)]
        if side.is_distributed:
            losses = [loss / side.size for loss in world.all_reduce(losses)]
        return {"losses": torch.tensor(losses, dtype=torch.float64), **outcome(model, optimizer)}

    assert_same_on_both_sides(script, world, gather=gather)


def test_lbfgs_is_refused_with_the_reason(gather: Gather, world: World) -> None:
    model = layers()
    with raises(ConfigError, "trial-step-failed", "closure"):
        DistributedOptimizer(
            torch.optim.LBFGS(model.parameters()), model, world=world, gather=gather
        )


def test_the_last_step_is_not_lost(gather: Gather, world: World) -> None:
    """The next forward need not come."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        train(side, model, optimizer, 1)
        if side.is_distributed:
            optimizer.close()
        return {name: param.detach().clone() for name, param in model.named_parameters()}

    assert_same_on_both_sides(script, world, gather=gather)


def test_closing_twice_is_harmless_and_stepping_after_it_is_refused(
    gather: Gather, world: World
) -> None:
    """Neither waits for ranks that do not come."""
    model = layers()
    side = Side(world, gather=gather)
    optimizer = side.wrap(adam(model), model)
    train(side, model, optimizer, 1)
    optimizer.close()
    optimizer.close()
    side.loss(model, 1).backward()
    with raises(UsageError, "optimizer-closed"):
        optimizer.step()
    with raises(UsageError, "optimizer-closed"):
        optimizer.clip_grad_norm_(1.0)
    assert optimizer.state_dict()["state"]
