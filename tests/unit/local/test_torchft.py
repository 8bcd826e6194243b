"""Streaming DiLoCo as torchft does it, played by one process, beside LocalOptimizer on ranks."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from dearmpi.comm.world import World
from tests.fakes.ranks import run_ranks
from tests.mpi.local_steps import Case, adamw, backward, steps_of
from tests.mpi.models import build_model
from tests.mpi.oracle import copies

CASES = [
    Case(sync_every=4),
    Case(sync_every=6, fragments=3, delay=1),
    Case(sync_every=9, fragments=3, delay=2),
    Case(sync_every=9, fragments=3, delay=2, outer_momentum=0.0),
]
Fragments = tuple[tuple[str, ...], ...]


class Replica:
    """A replica group: its inner optimizer, and for each fragment the originals and an outer SGD.

    Where torchft differs from the paper: the outer step is taken when the result is merged, on
    parameters put back to where the exchange before had left them.
    """

    def __init__(self, case: Case, fragments: Fragments) -> None:
        self.model = build_model(case.model)
        self.inner = adamw(self.model.parameters())
        self.params = dict(self.model.named_parameters())
        self.originals = copies(self.model)
        self.outer = [
            torch.optim.SGD(
                [self.params[name] for name in names],
                lr=case.outer_lr,
                momentum=case.outer_momentum,
                nesterov=case.outer_momentum > 0,
            )
            for names in fragments
        ]

    def changes(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """What an outer gradient is the mean of."""
        return {name: self.originals[name] - self.params[name].detach() for name in names}

    def merge(self, fragment: int, means: dict[str, Tensor]) -> None:
        for name, mean in means.items():
            self.params[name].data.copy_(self.originals[name])
            self.params[name].grad = mean.clone()
        self.outer[fragment].step()
        for name in means:
            self.originals[name].copy_(self.params[name].detach())


def play(case: Case, fragments: Fragments, *, size: int, num_steps: int) -> list[dict[str, Tensor]]:
    """The parameters of each replica; fragment i is sent after (i + 1) / F of the steps."""
    replicas = [Replica(case, fragments) for _ in range(size)]
    sent: dict[int, dict[str, Tensor]] = {}
    for step in range(1, num_steps + 1):
        for rank, replica in enumerate(replicas):
            backward(replica.model, step - 1, rank)
            replica.inner.step()
        for number, names in enumerate(fragments):
            offset = math.floor(case.sync_every / len(fragments) * (number + 1))
            if (step - offset) % case.sync_every == 0:
                of_ranks = [replica.changes(names) for replica in replicas]
                sent[number] = {
                    name: torch.stack([one[name] for one in of_ranks]).mean(0) for name in names
                }
            if number in sent and (step - offset - case.delay) % case.sync_every == 0:
                means = sent.pop(number)
                for replica in replicas:
                    replica.merge(number, means)
    return [copies(replica.model) for replica in replicas]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_train_as_torchfts_replicas(case: Case) -> None:
    def train(world: World) -> tuple[dict[str, Tensor], Fragments]:
        model = build_model(case.model)
        optimizer = case.optimizer(model, world)
        steps_of(model, optimizer, range(23))
        optimizer.synchronize()
        found = copies(model)
        optimizer.close()
        return found, optimizer.fragments

    results = run_ranks(2, train)
    ours = results[0][1]  # of which the first one travels last
    expected = play(case, (*ours[1:], ours[0]), size=2, num_steps=23)
    for (found, _), replica in zip(results, expected, strict=True):
        for name, value in replica.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def test_a_rank_goes_on_while_its_exchange_travels() -> None:
    """Rank 1 takes the step of the exchange only once rank 0 has taken all steps before the merge;
    at the merge rank 0 waits for it.
    """
    case = Case(sync_every=6, delay=3)
    is_past, is_let = threading.Event(), threading.Event()

    def train(world: World) -> Any:
        model = build_model("dense")
        optimizer = case.optimizer(model, world)
        steps_of(model, optimizer, range(5))
        if world.is_root:
            steps_of(model, optimizer, range(5, 8))
            waited_s = optimizer.waited_s
            is_past.set()
            assert is_let.wait(60)
        else:
            assert is_past.wait(60), "rank 0 waits for an exchange that is merged later"
            is_let.set()
        steps_of(model, optimizer, range(optimizer.num_steps, 9))
        if world.is_root:
            assert optimizer.waited_s > waited_s
        optimizer.close()

    run_ranks(2, train)
