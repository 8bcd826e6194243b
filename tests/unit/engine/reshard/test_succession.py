"""Succession: buckets change while all that the last step has begun is under way."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from dearmpi import DistributedOptimizer
from dearmpi.comm.algorithms.transfer import Transfer
from dearmpi.comm.world import World
from dearmpi.engine.bucket.bucket_state import BucketState
from dearmpi.engine.iteration.engine import Engine
from dearmpi.engine.reshard import relocation
from tests.fakes.ranks import run_ranks
from tests.unit.engine.chain import Chain, distribute
from tests.unit.engine.stage import Stage, wait_for


def test_a_layer_waits_only_for_the_gathers_of_what_shares_a_bucket_with_it_now() -> None:
    stage = Stage(num_layers=4)
    layouts: list[list[int]] = []

    def rank(world: World) -> None:
        first = True

        def moment(label: str) -> None:
            if not first:
                stage.note(world.rank, label)

        model = Chain(4, moment)
        optimizer = distribute(model, world)
        model.backward()
        optimizer.step()
        optimizer.fuse(0.0012)
        layouts.append([len(bucket.placements) for bucket in optimizer.layout])
        stage.note(world.rank, "fused")
        first = False
        model(torch.ones(2, 4))
        optimizer.close()

    with stage.running(rank):
        stage.await_moment("fused")
        for bucket in (3, 2, 1, 0):
            stage.finish(f"RS{bucket}")
        for bucket, layer in enumerate((0, None, 2, 3)):
            assert not stage.has_happened(f"F{bucket}")
            stage.finish(f"AG{bucket}")
            if layer is not None:
                stage.await_moment(f"F{layer}")
    assert layouts == [[1, 2, 1]] * 2
    for rank_ in range(2):
        computed_s = [stage.log[rank_, f"F{layer}"] for layer in range(4)]
        assert computed_s == [5.0, 7.0, 7.0, 8.0]


@pytest.mark.parametrize("eager", [False, True])
def test_backprop_and_step_wait_for_no_state_but_updates_do(
    eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrives = threading.Event()

    class Held(Transfer):
        def test(self) -> bool:
            return arrives.is_set() and super().test()

    monkeypatch.setattr(relocation, "Transfer", Held)

    def rank(world: World, *, fuses: bool) -> list[Tensor]:
        model = Chain(3)
        optimizer = make(model, world, eager=eager)
        model.backward()
        optimizer.step()
        if fuses:
            optimizer.fuse(1.0)
        model.backward()
        optimizer.step()
        if fuses:
            buckets = [update.bucket for update in optimizer._assembly.updates]
            wait_for(lambda: all(b.state is BucketState.REDUCED for b in buckets), "reducing")
            world.barrier()
            arrives.set()
        optimizer.close()
        return [param.detach().clone() for param in model.parameters()]

    changed = run_ranks(2, lambda world: rank(world, fuses=True))[0]
    stayed = run_ranks(2, lambda world: rank(world, fuses=False))[0]
    assert all(torch.equal(one, other) for one, other in zip(changed, stayed, strict=True))


@pytest.mark.parametrize("ranks", [(0, 1), (0,)])
def test_what_nobody_guards_has_moved_before_the_step_is_over(ranks: tuple[int, ...]) -> None:
    """A graph that reads parameters past all hooks must not see them move; only some ranks may have
    compiled one.
    """

    def rank(world: World) -> None:
        model = Chain(3)
        optimizer = make(model, world)
        model.backward()
        optimizer._assembly.updates[1].bucket.unguarded = world.rank in ranks
        optimizer.step()
        optimizer.fuse(1.0)
        buckets = [update.bucket for update in optimizer._assembly.updates]
        assert world.rank not in ranks or all(bucket.is_current() for bucket in buckets)
        optimizer.close()

    run_ranks(2, rank)


def test_gradients_that_a_script_has_set_aside_stay_as_they_are() -> None:
    """Parameters move to where gradients were, but not to where a script may still have some."""

    def rank(world: World) -> None:
        model = Chain(3)
        optimizer = make(model, world)
        model.backward()
        optimizer.step()
        with optimizer.no_sync():
            model.backward()
        aside = [param.grad for param in model.parameters()]
        optimizer.zero_grad()
        kept = [None if grad is None else grad.clone() for grad in aside]
        optimizer.fuse(1.0)
        optimizer.synchronize()
        moved = [param.detach().clone() for param in model.parameters()]
        for grad, before in zip(aside, kept, strict=True):
            assert grad is not None and before is not None and torch.equal(grad, before)
            grad.zero_()
        params = [param.detach() for param in model.parameters()]
        assert all(torch.equal(one, other) for one, other in zip(params, moved, strict=True))
        optimizer.close()

    run_ranks(2, rank)


def test_what_the_main_thread_has_waited_counts_once() -> None:
    def rank(world: World) -> None:
        model = Chain(2)
        optimizer = make(model, world)
        model.backward()
        optimizer.step()
        engine = optimizer._assembly.engine
        assert isinstance(engine, Engine)
        with engine.pipeline.clock.waiting("nothing"):
            pass
        before_s = optimizer.waited_s
        optimizer.fuse(1.0)
        assert 0 < before_s == optimizer.waited_s
        optimizer.close()
        assert optimizer.waited_s >= before_s

    run_ranks(2, rank)


def make(model: Chain, world: World, **settings: Any) -> DistributedOptimizer:
    """With state, in a bucket for each layer."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return DistributedOptimizer(inner, model, world=world, bucket_cap_mb=1e-6, **settings)
