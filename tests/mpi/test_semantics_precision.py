"""Clipping, loss scaling and reduced precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dearmpi
from dearmpi.comm.world import World
from dearmpi.errors import UsageError
from tests.codes import raises
from tests.mpi.models import NUM_FEATURES, squared_error
from tests.mpi.semantics import (
    SEMANTICS,
    Side,
    adam,
    assert_same_on_both_sides,
    layers,
    outcome,
    seeded,
)

pytestmark = SEMANTICS


def single_precision() -> nn.Sequential:
    model: nn.Sequential = seeded(
        lambda: nn.Sequential(nn.Linear(NUM_FEATURES, 7), nn.Tanh(), nn.Linear(7, 3)),
        torch.float32,
    )
    return model


@pytest.mark.parametrize("max_norm", [0.05, 1e6], ids=["above the norm", "below the norm"])
def test_clipping_by_the_global_norm(max_norm: float, gather: str, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        norms = []
        for step in range(4):
            optimizer.zero_grad()
            side.loss(model, step).backward()
            norms.append(side.clip(optimizer, model, max_norm).item())
            optimizer.step()
        norms_seen = torch.tensor(norms, dtype=torch.float64)
        return {"norms": norms_seen, **outcome(model, optimizer)}

    assert_same_on_both_sides(script, world, gather=gather)


@pytest.mark.parametrize(
    "clip",
    [
        lambda params: nn.utils.clip_grad_norm_(params, 0.5),
        lambda params: nn.utils.clip_grad_norm_(params, 0.5, float("inf"), foreach=False),
        lambda params: nn.utils.clip_grad_norm_(params, 0.5, 1.0, True, foreach=True),
        lambda params: nn.utils.clip_grad_norm_(params[2:], 0.5),
        lambda params: nn.utils.clip_grad_value_(params, 0.1),
        lambda params: nn.utils.clip_grad_value_(params, 0.1, foreach=True),
        lambda params: nn.utils.get_total_norm([p.grad for p in params]),
        lambda params: [p.grad.mul_(0.5) for p in params],
    ],
    ids=["norm", "largest", "foreach", "a part", "value", "values", "norm alone", "by hand"],
)
def test_torchs_clipping(clip: Callable[[Any], Any], gather: str, world: World) -> None:
    """Of all parameters, of some, and what it does to each by hand."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        norms = []
        for step in range(3):
            optimizer.zero_grad()
            side.loss(model, step).backward()
            norm = clip(list(model.parameters()))
            norms.append(norm.item() if isinstance(norm, Tensor) else 0.0)
            optimizer.step()
        seen = torch.tensor(norms, dtype=torch.float64)
        return {"norms": seen, **outcome(model, optimizer)}

    assert_same_on_both_sides(script, world, gather=gather)


def test_gradients_are_shown_whole(gather: str, world: World) -> None:
    """Before and after they are clipped."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        seen: dict[str, Tensor] = {}
        for step in range(2):
            side.loss(model, step).backward()
            for when in ("before", "after"):
                if side.is_distributed:
                    grads = optimizer.gradients()
                else:
                    grads = {
                        n: p.grad * 1 for n, p in model.named_parameters() if p.grad is not None
                    }
                seen |= {f"{name} {when} {step}": grad for name, grad in grads.items()}
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return {**seen, **outcome(model, optimizer)}

    assert_same_on_both_sides(script, world, gather=gather)


def test_the_norm_alone(gather: str, world: World) -> None:
    """A limit of infinity clips nothing."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        side.loss(model, 0).backward()
        norm = side.clip(optimizer, model, float("inf"))
        optimizer.step()
        return {"norm": norm, **outcome(model, optimizer)}

    assert_same_on_both_sides(script, world, gather=gather)


def test_torchs_clipping_of_gradients_that_are_still_local(gather: str, world: World) -> None:
    """Inside ``no_sync`` a rank's gradients are its own to change."""

    def script(side: Side) -> dict[str, Tensor]:
        model = layers()
        optimizer = side.wrap(adam(model), model)
        with side.no_sync(optimizer):
            side.loss(model, 0).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5)
        optimizer.step()
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather)


Change = Callable[[nn.Sequential, Tensor], Tensor]


def train_scaled(side: Side, *, clips: bool, change: Change | None = None) -> dict[str, Tensor]:
    """Loss scaling by powers of two is exact; ``change`` is for the last rank's loss in step 2."""
    model = layers()
    optimizer = side.wrap(adam(model), model)
    scaler = (dearmpi.GradScaler if side.is_distributed else torch.amp.GradScaler)(
        "cpu", init_scale=256.0, growth_interval=2
    )
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        loss = side.loss(model, step)
        if change is not None and step == 2 and side.rank == side.size - 1:
            loss = change(model, loss)
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            side.clip(optimizer, model, 0.05)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {"scales": torch.tensor(scales), **outcome(model, optimizer)}


@pytest.mark.parametrize("clips", [False, True], ids=["", "and clipping"])
def test_grad_scaler(clips: bool, gather: str, world: World) -> None:
    assert_same_on_both_sides(lambda side: train_scaled(side, clips=clips), world, gather=gather)


@pytest.mark.parametrize(
    "change",
    [
        lambda _, loss: loss * float("inf"),
        lambda model, loss: loss + float("inf") * model[0].weight[0, 0],  # in one rank's shard
    ],
    ids=["everywhere", "in one element"],
)
@pytest.mark.parametrize("clips", [False, True], ids=["", "and clipping"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    clips: bool, change: Change, gather: str, world: World
) -> None:
    assert_same_on_both_sides(
        lambda side: train_scaled(side, clips=clips, change=change), world, gather=gather
    )


@pytest.mark.ranks(2, 3)
def test_torchs_grad_scaler_is_refused(gather: str, world: World) -> None:
    model = layers()
    side = Side(world, gather=gather)
    optimizer = side.wrap(adam(model), model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(side.loss(model, 0)).backward()
    with raises(UsageError, "gradient-in-reduction", "dearmpi.GradScaler"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    side.close()


@pytest.mark.ranks(2, 3)
def test_scaling_of_gradients_that_are_updated_at_once_is_refused(
    gather: str, world: World
) -> None:
    model = layers()
    side = Side(world, gather=gather, eager=True)
    optimizer = side.wrap(adam(model), model)
    scaler = dearmpi.GradScaler("cpu")
    scaler.scale(side.loss(model, 0)).backward()
    with raises(UsageError, "eager-forbids", "eager=False"):
        scaler.unscale_(optimizer)
    optimizer.step()
    side.close()


@pytest.mark.ranks(2, 3)
def test_a_grad_scaler_inside_join_is_refused(gather: str, world: World) -> None:
    """A rank without batches could not know that a step was skipped."""
    model = layers()
    side = Side(world, gather=gather)
    optimizer = side.wrap(adam(model), model)
    scaler = dearmpi.GradScaler("cpu")
    with optimizer.join():
        scaler.scale(side.loss(model, 0)).backward()
        with raises(UsageError, "join-misused", "scaling gradients", "inside join"):
            scaler.step(optimizer)
        optimizer.step()
    side.close()


def test_fp16_parameters_cannot_be_unscaled(gather: str, world: World) -> None:
    model = seeded(lambda: nn.Linear(NUM_FEATURES, 3), torch.float16)
    side = Side(world, gather=gather)
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scaler = dearmpi.GradScaler("cpu", init_scale=2.0)
    scaler.scale(side.loss(model, 0)).backward()
    with pytest.raises(ValueError, match="fp16 parameters"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    side.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast(dtype: torch.dtype, gather: str, world: World) -> None:
    """Sums over samples are rounded to few bits, so the numbers are near, and not the same."""
    computed = []

    def script(side: Side) -> dict[str, Tensor]:
        model = single_precision()
        optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), model)
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                outputs = model(side.inputs(step, torch.float32))
            computed.append(outputs.dtype)
            side.average(squared_error(outputs.float())).backward()
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather, rtol=0.02, atol=0.02)
    assert set(computed) == {dtype}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_parameters_in_half_precision(dtype: torch.dtype, gather: str, world: World) -> None:
    def script(side: Side) -> dict[str, Tensor]:
        model = single_precision().to(dtype)
        optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), model)
        for step in range(4):
            optimizer.zero_grad()
            side.loss(model, step).backward()
            optimizer.step()
        return outcome(model, optimizer)

    assert_same_on_both_sides(script, world, gather=gather, rtol=0.02, atol=0.02)
