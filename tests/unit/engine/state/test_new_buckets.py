"""New buckets between two steps: what a script has kept stays, and times go on."""

from __future__ import annotations

import torch

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.engine.iteration.engine import Engine
from tests.fakes.ranks import run_ranks
from tests.unit.engine.chain import Chain


def test_gradients_that_a_script_has_set_aside_stay_as_they_are() -> None:
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
        engine = optimizer._built.engine
        assert isinstance(engine, Engine)
        with engine.state.clock.waiting("nothing"):
            pass
        before_s = optimizer.waited_s
        optimizer.fuse(1.0)
        assert 0 < before_s == optimizer.waited_s
        optimizer.close()
        assert optimizer.waited_s >= before_s

    run_ranks(2, rank)


def make(model: Chain, world: World) -> DistributedOptimizer:
    """With state, in a bucket for each layer."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return DistributedOptimizer(inner, model, world=world, bucket_cap_mb=1e-6)
