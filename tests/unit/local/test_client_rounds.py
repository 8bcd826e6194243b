"""Scaffnew, CompressedScaffnew and TAMUNA: masks, equal ranks, and the order of updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import islice, permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from dearmpi.local.client_rounds import ClientRounds, control_sum, mask_of
from dearmpi.plan.data.local_schedule import Round, RoundRule
from tests.codes import raises
from tests.fakes.ranks import run_ranks

NUM_CLIENTS, KAPPA = 12, 16.0
Gradient = Callable[[int, Tensor], Tensor]


@given(st.integers(1, 40), st.integers(1, 12), st.data())
def test_masks_share_the_work(size: int, cohort: int, data: st.DataObject) -> None:
    sparsity = data.draw(st.integers(1, cohort))
    masks = torch.stack(
        [mask_of(column, 0, size, sparsity=sparsity, cohort=cohort) for column in range(cohort)]
    )
    assert (masks.sum(0) == sparsity).all()
    assert int(masks.sum(1).max() - masks.sum(1).min()) <= 1
    first = data.draw(st.integers(0, size))
    part = mask_of(0, first, size, sparsity=sparsity, cohort=cohort)
    assert torch.equal(part, masks[0, first:])
    most = -(-(size - first) * sparsity // cohort)  # of any stretch, so that messages are as long
    assert int(masks[:, first:].sum(1).max()) <= most


@cache
def digits() -> tuple[list[Tensor], list[Tensor], float]:
    """Features with a sign of each client, sorted by digit, and the regularisation."""
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    x = torch.tensor(images[:480], dtype=torch.float64)
    x = torch.cat([(x - x.mean(0)) / 8, torch.ones(480, 1, dtype=torch.float64)], 1)
    y = torch.tensor(labels[:480])
    order = torch.argsort(y, stable=True)
    signed = torch.where(y[order] < 5, 1.0, -1.0)[:, None] * x[order]
    parts = [
        part / float(torch.linalg.matrix_norm(part, 2) / math.sqrt(len(part)))
        for part in signed.chunk(NUM_CLIENTS)
    ]
    convexity = 0.25 / (KAPPA - 1)  # of the regularisation: L is 1/4 and this
    return parts, list(y.chunk(NUM_CLIENTS)), convexity


def gradient(client: int, point: Tensor) -> Tensor:
    """Of a client's regularised logistic loss."""
    parts, _, convexity = digits()
    rows = parts[client]
    return -(rows.T @ torch.sigmoid(-(rows @ point))) / len(rows) + convexity * point


def mean_gradient(point: Tensor) -> Tensor:
    return torch.stack([gradient(client, point) for client in range(NUM_CLIENTS)]).mean(0)


@cache
def optimum() -> Tensor:
    """By gradient descent to the last digit."""
    _, _, convexity = digits()
    point = torch.zeros(65, dtype=torch.float64)
    for _ in range(600):
        point = point - 2 / (0.25 + 2 * convexity) * mean_gradient(point)
    return point


def rule_of(sparsity: int, cohort: int, seed: int = 0) -> RoundRule:
    _, _, convexity = digits()
    return RoundRule.of_smoothness(
        0.25 + convexity,
        convexity,
        num_clients=NUM_CLIENTS,
        sparsity=sparsity,
        cohort=cohort,
        seed=seed,
    )


def solve(world: World, rule: RoundRule, rounds: int) -> tuple[Tensor, float, int]:
    start = torch.zeros(65, dtype=torch.float64)
    clients = ClientRounds(start, rule, world=world)
    most = 0.0
    for number in range(rounds):
        clients.run(gradient)
        if number % 50 == 0 or number == rounds - 1:
            total = control_sum(world, clients.controls, like=start)
            most = max(most, float(total.abs().max()))
    found = clients.shared.clone()
    clients.close()
    return found, most, clients.num_steps


@pytest.mark.parametrize(("sparsity", "cohort"), [(12, 12), (2, 12), (3, 4)])
def test_trajectories_are_the_same_on_any_number_of_ranks(sparsity: int, cohort: int) -> None:
    rule = rule_of(sparsity, cohort)
    alone, _, _ = run_ranks(1, lambda world: solve(world, rule, 40))[0]
    for size in (2, 3):
        for found, most, _ in run_ranks(size, lambda world: solve(world, rule, 40)):
            torch.testing.assert_close(found, alone, rtol=1e-11, atol=1e-13)
            assert most < 1e-12


def test_all_clients_in_each_step_are_gradient_descent() -> None:
    rule = RoundRule(NUM_CLIENTS, 2.0, 1.0, NUM_CLIENTS, NUM_CLIENTS)
    found, _, steps = run_ranks(2, lambda world: solve(world, rule, 30))[0]
    point = torch.zeros(65, dtype=torch.float64)
    for _ in range(30):
        point = point - 2.0 * mean_gradient(point)
    assert steps == 30
    torch.testing.assert_close(found, point, rtol=1e-12, atol=1e-14)


def simulate(rule: RoundRule, rounds: int, *, late: bool) -> float:
    """Distance from the optimum, where control variates follow at once, or ``late``."""
    shared = torch.zeros(65, dtype=torch.float64)
    h = torch.zeros(NUM_CLIENTS, 65, dtype=torch.float64)
    owed: dict[int, tuple[Tensor, Tensor]] = {}
    for number in range(rounds):
        drawn = rule.draw(number)
        total = torch.zeros_like(shared)
        for column, client in enumerate(drawn.cohort):
            if client in owed:  # by what is shared when it takes part again
                mask, value = owed.pop(client)
                h[client] += rule.eta / rule.lr * mask * (shared - value)
            columns = {"sparsity": rule.sparsity, "cohort": rule.cohort}
            mask = mask_of(column, 0, 65, **columns).double()
            value = shared.clone()
            for _ in range(drawn.num_steps):
                value -= rule.lr * (gradient(client, value) - h[client])
            owed[client] = mask, value
            total += mask * value
        shared = total / rule.sparsity
        if not late:
            for client, (mask, value) in owed.items():
                h[client] += rule.eta / rule.lr * mask * (shared - value)
            owed.clear()
    return float((shared - optimum()).square().sum())


def test_control_variates_that_follow_late_lead_elsewhere() -> None:
    rule = rule_of(2, 4)
    at_once, late = (simulate(rule, 900, late=late) for late in (False, True))
    assert at_once < 1e-20
    assert not late < 1e-2
    found, _, _ = run_ranks(1, lambda world: solve(world, rule, 60))[0]
    near = float((found - optimum()).square().sum())
    assert near == pytest.approx(simulate(rule, 60, late=False), rel=1e-9)


class OneOfAll(RoundRule):
    """A round of one step, by a cohort of its own: all orders of all cohorts take turns."""

    __slots__ = ()

    def draw(self, number: int) -> Round:
        cohorts = permutations(range(self.num_clients), self.cohort)
        return Round(next(islice(cohorts, number, None)), 1)


@pytest.mark.parametrize(("sparsity", "cohort"), [(5, 5), (2, 5), (3, 4), (2, 2)])
def test_a_step_contracts_by_what_the_theory_promises(sparsity: int, cohort: int) -> None:
    """The paper's Lyapunov function at condition 1000, in the mean over all cohorts and over
    whether the step is its round's last: for errors of control variates the bound is an equality.
    """
    num_clients, size, convexity = 5, 2 * cohort, 1e-3
    found = RoundRule.of_smoothness(
        1.0, convexity, num_clients=num_clients, sparsity=sparsity, cohort=cohort
    )
    rule = OneOfAll(num_clients, found.lr, found.p, sparsity, cohort)
    generator = torch.Generator().manual_seed(sparsity)
    errors = torch.randn(num_clients, size, generator=generator, dtype=torch.float64)
    errors -= errors.mean(0)  # control variates add up to zero
    start = torch.zeros(size, dtype=torch.float64)  # the optimum, and theirs is zero
    others = (sparsity - 1) / (num_clients - 1)
    kept = 1 - (rule.p * others) ** 2 * num_clients / sparsity
    weight = rule.lr / (1 - kept)
    number_of_cohorts = math.perm(num_clients, cohort)

    def step(world: World) -> float:
        total = 0.0
        for number in range(number_of_cohorts):
            clients = ClientRounds(start, rule, world=world)
            clients.num_rounds = number
            for client, error in enumerate(errors):
                clients.controls[client].copy_(error)
            clients.run(lambda client, point: convexity * point)
            total += num_clients / rule.lr * float(clients.shared.square().sum())
            for control in clients.controls.values():
                total += weight * float(control.square().sum())
            clients.close()
        return total / number_of_cohorts

    (last,) = run_ranks(1, step, progress="poll")
    before = weight * float(errors.square().sum())
    silent = before + rule.lr * float(errors.square().sum())
    after = rule.p * last + (1 - rule.p) * silent
    assert (before - after) / before == pytest.approx(1 - kept, rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ((12, 0.1, 0.0, 2, 4), "out-of-range"),
        ((12, 0.1, 1.5, 2, 4), "out-of-range"),
        ((12, 0.1, 0.5, 1, 4), "out-of-range"),
        ((12, 0.1, 0.5, 5, 4), "out-of-range"),
        ((12, 0.1, 0.5, 2, 13), "out-of-range"),
        ((12, -0.1, 0.5, 2, 4), "out-of-range"),
        ((12, 0.1, 0.5, 2.0, 4), "wrong-type"),
    ],
)
def test_settings_without_meaning_are_refused(
    settings: tuple[int, float, float, int, int], code: str
) -> None:
    with raises(ConfigError, code):
        RoundRule(*settings)
