"""torch.nn.utils.clip_grad_norm_ and its like on gradients that lie in the ranks' shards."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import dearmpi
from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.errors import ReplicaMismatchError, UsageError
from tests.codes import raises
from tests.fakes.ranks import run_ranks
from tests.mpi.models import fill

GATHERS = pytest.mark.parametrize("gather", ["parameters", "gradients"])
BATCH = 6


def build() -> nn.Sequential:
    """Three layers, whose elements are dealt to ranks unevenly."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    fill(model.double())
    return model


def wrap(optimizer: torch.optim.Optimizer, model: nn.Module, world: World, **settings: Any) -> Any:
    return DistributedOptimizer(optimizer, model, world=world, bucket_cap_mb=1e-4, **settings)


def loss(model: nn.Module, world: World | None, step: int = 0) -> Any:
    """The mean over this rank's samples, or over all."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 3, generator=generator, dtype=torch.float64)
    return model(inputs if world is None else inputs[world.rank :: world.size]).square().mean()


def backward_of_both(world: World, gather: Any, **settings: Any) -> tuple[Any, Any, Any]:
    """A wrapped optimizer after a backward, its model, and one that has done it alone."""
    model, alone = build(), build()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = wrap(inner, model, world, gather=gather, **settings)
    loss(model, world).backward()
    loss(alone, None).backward()
    return optimizer, model, alone


def grads_of(model: nn.Module) -> list[Any]:
    return [param.grad for param in model.parameters()]


@GATHERS
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("schedule", ["dear", "serial"])
def test_norms_of_every_type(schedule: str, size: int, gather: Any) -> None:
    types = (0, 0.5, 1, 2, 3.0, -2, math.inf, -math.inf)

    def rank(world: World) -> None:
        optimizer, model, alone = backward_of_both(world, gather, schedule=schedule)
        for norm_type in types:
            for foreach in (None, False, True):
                found, wanted = (
                    get_total_norm(grads_of(one), norm_type, foreach=foreach)
                    for one in (model, alone)
                )
                torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)
        for found, wanted in zip(grads_of(model), grads_of(alone), strict=True):
            torch.testing.assert_close(found.detach().norm(), wanted.norm())
            torch.testing.assert_close(torch.norm(found, p=1), torch.norm(wanted, p=1))
        optimizer.zero_grad()
        optimizer.close()

    run_ranks(size, rank)


@GATHERS
@pytest.mark.parametrize(
    "change",
    [
        lambda grads: [grad.clamp_(-0.1, max=0.05) for grad in grads],
        lambda grads: [grad.div_(torch.tensor(3.0)) for grad in grads],
        lambda grads: [torch.nan_to_num_(grad, nan=0.0) for grad in grads],
        lambda grads: [grad.mul_(2 / float(grad.norm())) for grad in grads],
        lambda grads: torch._foreach_mul_(grads, -1.0),
        lambda grads: [grads[0].zero_(), torch.zero_(grads[-1])],
        lambda grads: [grad.neg_().sign_() for grad in grads],
    ],
    ids=["clamp", "divide", "numbers", "one by one", "together", "zeros", "signs"],
)
def test_changes_by_hand_are_those_of_whole_gradients(
    change: Callable[[list[Tensor]], object], gather: Any
) -> None:
    def rank(world: World) -> None:
        optimizer, model, alone = backward_of_both(world, gather)
        for one in (model, alone):
            change(grads_of(one))
            clip_grad_norm_(one.parameters(), 0.3)
        found = optimizer.gradients()
        for name, param in alone.named_parameters():
            torch.testing.assert_close(found[name], param.grad, rtol=1e-10, atol=1e-13)
        optimizer.zero_grad()
        optimizer.close()

    run_ranks(2, rank)


@GATHERS
def test_one_norm_over_two_optimizers(gather: Any) -> None:
    """torch's function takes in the parameters of both."""

    def train(world: World | None) -> list[Tensor]:
        model = build()
        halves = [list(model[:2].parameters()), list(model[2:].parameters())]
        optimizers: list[Any] = [torch.optim.SGD(half, lr=0.5, momentum=0.9) for half in halves]
        if world is not None:
            optimizers = [wrap(one, model, world, gather=gather) for one in optimizers]
        for step in range(3):
            loss(model, world, step).backward()
            clip_grad_norm_(model.parameters(), 0.2)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for optimizer in optimizers if world is not None else ():
            optimizer.close()
        return [param.detach().clone() for param in model.parameters()]

    wanted = train(None)
    for found in run_ranks(2, train):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


@GATHERS
def test_accumulated_and_unscaled_gradients_are_clipped_once_they_are_averaged(
    gather: Any,
) -> None:
    def train(world: World | None) -> list[Tensor]:
        model = build()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
        if world is not None:
            optimizer = wrap(optimizer, model, world, gather=gather)
        scaler = dearmpi.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            if world is not None:
                with optimizer.no_sync():
                    scaler.scale(loss(model, world, step)).backward()
            else:
                scaler.scale(loss(model, world, step)).backward()
            for more in (10, 20):  # the second adds to what is reduced
                scaler.scale(loss(model, world, step + more)).backward()
                if more == 10:
                    get_total_norm(grads_of(model))  # and counts in the norm
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.2)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if world is not None:
            optimizer.close()
        return [param.detach().clone() for param in model.parameters()]

    wanted = train(None)
    for found in run_ranks(2, train):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


@GATHERS
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_gradient_that_some_ranks_lack_is_named_on_all(norm_type: float, gather: Any) -> None:
    """torch leaves out what is None: ranks would clip by different norms."""

    def rank(world: World) -> None:
        model = build()
        branch = nn.Linear(3, 1).double()
        whole = nn.ModuleDict({"trunk": model, "branch": branch})
        optimizer = wrap(torch.optim.SGD(whole.parameters(), lr=0.1), whole, world, gather=gather)
        total = loss(model, world)
        if world.rank == 1:
            total = total + loss(branch, world)
        total.backward()
        with raises(
            UsageError, "gradient-missing-on-some-ranks", "branch.w", "optimizer.clip_grad"
        ):
            clip_grad_norm_(whole.parameters(), 0.1, norm_type)
        assert optimizer.clip_grad_norm_(math.inf, norm_type) > 0
        optimizer.step()
        optimizer.close()

    run_ranks(2, rank)


@GATHERS
def test_a_norm_that_takes_in_foreign_parameters_is_no_norm_of_all_ranks(gather: Any) -> None:
    """Each rank would scale its shards by a factor of its own."""

    def rank(world: World) -> None:
        model, foreign = build(), nn.Linear(1, 1).double()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = wrap(inner, model, world, gather=gather)
        loss(model, world).backward()
        foreign(torch.full((1, 1), 10.0 + world.rank, dtype=torch.float64)).sum().backward()
        clip_grad_norm_([*model.parameters(), *foreign.parameters()], 0.1)
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(ReplicaMismatchError, match="changed gradients differently"):
        run_ranks(2, rank)


@GATHERS
def test_values_clipped_on_some_ranks_only_are_noticed(gather: Any) -> None:
    def rank(world: World) -> None:
        model = build()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = wrap(inner, model, world, gather=gather)
        loss(model, world).backward()
        if world.rank:
            clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(ReplicaMismatchError, match="changed gradients differently"):
        run_ranks(2, rank)


@GATHERS
def test_values_clipped_beside_a_gradient_local_on_one_rank_are_refused_on_all(gather: Any) -> None:
    """In the step, where ranks hear of each other; not for gradients that are dropped."""

    def rank(world: World) -> None:
        model = build()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, world, gather=gather)
        features = torch.ones(1, 4, dtype=torch.float64)
        for is_dropped in (True, False):
            with optimizer.no_sync():
                (loss(model, world) if world.rank else model[4](features).sum()).backward()
            model[4](features).sum().backward()
            clip_grad_value_(list(model.parameters())[::-1], 0.1)
            if is_dropped:
                optimizer.zero_grad()
        with raises(ReplicaMismatchError, "gradient-not-averaged", "0.weight"):
            optimizer.step()
            optimizer.synchronize()

    run_ranks(2, rank)


def refuse_a_gradient_of_no_sync(optimizer: Any, model: Any, world: World) -> None:
    with optimizer.no_sync():
        loss(model, world).backward()
    features = torch.ones(1, 4, dtype=torch.float64)
    model[4](features).sum().backward()  # does not reach the other layers
    with raises(UsageError, "gradient-not-averaged", "optimizer.clip_grad_norm_"):
        clip_grad_norm_(list(model.parameters())[::-1], 0.1)


def refuse_what_is_local_on_one_rank(optimizer: Any, model: Any, world: World) -> None:
    """On all ranks alike: the others would wait for it."""
    features = torch.ones(1, 4, dtype=torch.float64)
    with optimizer.no_sync():
        (loss(model, world) if world.rank else model[4](features).sum()).backward()
    model[4](features).sum().backward()
    with raises(UsageError, "gradient-not-averaged", "0.weight"):
        clip_grad_norm_(model.parameters(), 0.1)


def refuse_inside_join(optimizer: Any, model: Any, world: World) -> None:
    with optimizer.join():
        loss(model, world).backward()
        with raises(UsageError, "join-misused", "optimizer.clip_grad_norm_", "inside join()"):
            clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def test_ranks_without_batches_take_over_what_others_change_of_gradients() -> None:
    """Before a clipping that all ranks carry out, and before the step."""

    def rank(world: World) -> tuple[list[float], list[float]]:
        seen = []
        for clips_by_itself in (False, True):
            model = build()
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = wrap(inner, model, world, gather="gradients")
            optimizer.keep_gradients()
            norms = []
            with optimizer.join():
                for _ in range(3 if world.rank == 0 else 1):
                    optimizer.zero_grad()
                    loss(model, world).backward()
                    first = next(model.parameters())
                    assert first.grad is not None
                    first.grad = first.grad * 3
                    if clips_by_itself:
                        norms.append(float(optimizer.clip_grad_norm_(0.01)))
                    else:
                        norms.append(float(clip_grad_norm_(model.parameters(), 0.01)))
                    optimizer.step()
            values = [float(value) for p in model.parameters() for value in p.detach().flatten()]
            seen.append((values, norms))
            optimizer.close()
        assert seen[0][0] == pytest.approx(seen[1][0], rel=1e-12)
        assert seen[0][1] == pytest.approx(seen[1][1], rel=1e-12)
        return seen[0]

    (values, norms), (others, _) = run_ranks(2, rank)
    assert values == others
    assert len(norms) == 3 and min(norms) > 0.01


def test_what_one_rank_alone_does_to_gradients_inside_join_is_named() -> None:
    """The ranks that still train do something else next, or step."""

    def rank(world: World) -> None:
        model = build()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = wrap(inner, model, world, gather="gradients")
        optimizer.keep_gradients()
        with optimizer.join():
            for _ in range(world.rank):  # rank 0 has no batch
                loss(model, world).backward()
                if world.rank == 2:
                    first = next(model.parameters())
                    assert first.grad is not None
                    first.grad.sum()
                optimizer.step()
                optimizer.zero_grad()

    with raises(ReplicaMismatchError, "ranks-change-gradients-differently", "to read param.grad"):
        run_ranks(3, rank)


def refuse_what_is_used_up(optimizer: Any, model: Any, world: World) -> None:
    loss(model, world).backward()
    grads = grads_of(model)
    optimizer.step()
    with raises(UsageError, "gradient-used-up", "zero_grad"):
        get_total_norm(grads)


@GATHERS
@pytest.mark.parametrize(
    "script",
    [
        refuse_a_gradient_of_no_sync,
        refuse_what_is_local_on_one_rank,
        refuse_inside_join,
        refuse_what_is_used_up,
    ],
)
def test_what_torchs_clipping_would_get_wrong_is_refused(
    script: Callable[[Any, Any, World], None], gather: Any
) -> None:
    def rank(world: World) -> None:
        model = build()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, world, gather=gather)
        script(optimizer, model, world)
        optimizer.zero_grad()
        optimizer.close()

    run_ranks(2, rank)


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_that_no_rank_has_are_left_out(size: int) -> None:
    """And those shown are copies."""

    def rank(world: World) -> None:
        model = build()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, world)
        assert optimizer.gradients() == {}
        optimizer.zero_grad()
        model[4](torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        found = optimizer.gradients()
        assert list(found) == ["4.weight", "4.bias"]
        again = copy.deepcopy(found)
        found["4.bias"].zero_()
        assert torch.equal(optimizer.gradients()["4.bias"], again["4.bias"])
        optimizer.step()
        optimizer.close()

    run_ranks(size, rank)


def test_eager_updates_leave_no_gradients_to_clip_or_show() -> None:
    def rank(world: World) -> None:
        model = build()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, world, eager=True)
        loss(model, world).backward()
        for look in (lambda: clip_grad_norm_(model.parameters(), 1.0), optimizer.gradients):
            with raises(UsageError, "eager-forbids", "eager=False"):
                look()
        optimizer.step()
        optimizer.close()

    run_ranks(2, rank)
