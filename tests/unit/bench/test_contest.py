"""A contest treats all methods alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from dearmpi.bench.contest import Length, hold_contest
from dearmpi.bench.method import Entrant, Method, Setup, backpropagate
from dearmpi.bench.method import alone as train_alone
from dearmpi.bench.peers import read_method
from dearmpi.bench.subject import ReplaySubject
from dearmpi.comm.world import World
from dearmpi.engine.self_planning import LEAST_STEPS
from dearmpi.plan.profile import profile_workload
from dearmpi.plan.workload import read_workload

NUM_WARMUP, NUM_BATCHES = 1, 2


@pytest.mark.parametrize(
    ("num_tuning", "before"), [(0, (0, 0)), (2, (LEAST_STEPS, LEAST_STEPS)), (9, (LEAST_STEPS, 9))]
)
def test_every_method_is_as_warm_as_one_that_plans(
    alone: World, num_tuning: int, before: tuple[int, int]
) -> None:
    """The first iterations of a block take longer, whatever is done in them."""
    backprops: dict[str, int] = {}
    methods = [_counted("plain", backprops), _counted("other", backprops, num_tuning=num_tuning)]
    subject = ReplaySubject(
        profile_workload(read_workload("equal:0.01:2"), feed_forward_s=1e-4, backprop_s=2e-4),
        batch_size=8,
        rank=0,
        world_size=1,
    )
    length = Length(num_warmup=NUM_WARMUP, num_batches=NUM_BATCHES, num_rounds=1)
    result = hold_contest(alone, subject, methods, length=length, tell=lambda line: None)
    assert [len(row.iterations()) for row in result.rows] == [NUM_BATCHES, NUM_BATCHES]
    others = NUM_WARMUP + NUM_BATCHES
    assert (backprops["plain"] - others, backprops["other"] - others) == before


def test_what_tunes_itself_is_known_before_it_enters() -> None:
    tuned = [name for name in ("dear", "planned", "bayes", "ddp") if read_method(name).tunes_itself]
    assert tuned == ["planned", "bayes"]


def _counted(label: str, backprops: dict[str, int], *, num_tuning: int = 0) -> Method:
    """Plain torch, which counts its backprops and has the first ``num_tuning`` for itself."""
    backprops[label] = 0

    def enter(setup: Setup) -> Entrant:
        def backward(loss: Tensor) -> None:
            backprops[label] += 1
            backpropagate(loss)

        return replace(
            train_alone(setup), backward=backward, is_tuning=lambda: backprops[label] < num_tuning
        )

    return Method(label, enter, uses_group=False, tunes_itself=num_tuning > 0)
