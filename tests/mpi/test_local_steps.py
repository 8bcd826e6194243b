"""Local steps on real ranks equal one process that plays all of them."""

from __future__ import annotations

import pytest
import torch

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.local.client_rounds import ClientRounds, control_sum
from dearmpi.plan.data.local_schedule import RoundRule
from tests.mpi.local_steps import SMALL, Case, backward, sgd, simulate, steps_of
from tests.mpi.models import build_model

PLAIN = Case(sync_every=1, outer_lr=1.0, outer_momentum=0.0, inner=sgd)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].detach(), value, rtol=1e-10, atol=1e-12)


def test_an_exchange_in_each_step_equals_averaged_gradients(world: World) -> None:
    local, dense = build_model("dense"), build_model("dense")
    optimizer = PLAIN.optimizer(local, world)
    steps_of(local, optimizer, range(6))
    optimizer.close()
    averaged = DistributedOptimizer(sgd(dense.parameters()), dense, world=world, config=SMALL)
    for step in range(6):
        averaged.zero_grad()
        backward(dense, step, world.rank)
        averaged.step()
    averaged.close()
    assert_close(local.state_dict(), dense.state_dict())


@pytest.mark.parametrize(
    "case",
    [
        Case(sync_every=4),
        Case(sync_every=3, outer_lr=1.0, outer_momentum=0.0),
        Case(sync_every=12, fragments=3, delay=3, mix=0.5),
        Case(sync_every=5, fragments=3, delay=1, mix=0.25, model="text"),
        Case(sync_every=4, fragments=2, model="branches"),
    ],
    ids=["blocking", "average", "streaming", "uneven", "branches"],
)
def test_diloco_equals_one_process(case: Case, world: World) -> None:
    model = build_model(case.model)
    optimizer = case.optimizer(model, world)
    steps_of(model, optimizer, range(30))
    ranks, anchor = simulate(case, optimizer.fragments, size=world.size, num_steps=30)
    assert_close(model.state_dict(), ranks[world.rank])
    with optimizer.at_anchor():
        shared = {name: value.clone() for name, value in model.named_parameters() if name in anchor}
    assert_close(model.state_dict(), ranks[world.rank])
    trained = {name for names in optimizer.fragments for name in names}
    assert_close({name: shared[name] for name in trained}, {name: anchor[name] for name in trained})
    optimizer.close()


def test_clients_dealt_to_ranks_find_the_mean_of_their_functions(world: World) -> None:
    """Quadratics, whose common optimum is known."""
    targets = torch.linspace(-3.0, 5.0, 12 * 9, dtype=torch.float64).view(12, 9)
    weights = torch.linspace(1.0, 4.0, 12, dtype=torch.float64)
    rule = RoundRule.of_smoothness(4.0, 1.0, num_clients=12, sparsity=3, cohort=6)
    clients = ClientRounds(torch.zeros(9, dtype=torch.float64), rule, world=world)
    for _ in range(300):
        clients.run(lambda client, point: weights[client] * (point - targets[client]))
    optimum = (weights[:, None] * targets).sum(0) / weights.sum()
    torch.testing.assert_close(clients.shared, optimum, rtol=1e-10, atol=1e-10)
    total = control_sum(world, clients.controls, like=optimum)
    assert float(total.abs().max()) < 1e-12
    clients.close()
