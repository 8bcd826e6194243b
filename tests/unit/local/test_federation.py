"""Clients dealt to ranks: exact optima, rates, numbers sent, and averages that stall."""

from __future__ import annotations

import math
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from dearmpi.local.client_rounds import ClientRounds, control_sum
from dearmpi.local.federation import (
    Algorithm,
    FederationSettings,
    Trajectory,
    _is_hopeless,
    run_algorithm,
)
from dearmpi.plan.data.local_schedule import AveragingRule, RoundRule
from dearmpi.train.tasks.logistic import LogisticProblem, logistic_problem
from tests.codes import raises
from tests.fakes.ranks import run_ranks

pytest.importorskip("sklearn.datasets")
NUM_CLIENTS, CONDITION = 12, 30.0
TASKS = ("breast-cancer", "digits")


@cache
def problem_of(
    name: str, num_clients: int = NUM_CLIENTS, condition: float = CONDITION
) -> LogisticProblem:
    return logistic_problem(name, num_clients=num_clients, condition=condition)


@cache
def optimum_of(name: str, num_clients: int = NUM_CLIENTS, condition: float = CONDITION) -> Tensor:
    return problem_of(name, num_clients, condition).optimum()


def follow(
    world: World, name: str, algorithm: Algorithm, settings: FederationSettings
) -> Trajectory:
    """One algorithm on a task, as the command runs it."""
    problem = problem_of(name, settings.num_clients)
    return run_algorithm(
        algorithm,
        settings,
        start=torch.zeros(problem.size, dtype=torch.float64),
        optimum=optimum_of(name, settings.num_clients),
        smoothness=(problem.smoothness, problem.convexity),
        slopes_of=problem.slopes_of,
        world=world,
    )


@pytest.mark.parametrize("name", TASKS)
def test_slopes_are_those_of_the_loss_and_vanish_at_the_optimum(name: str) -> None:
    problem, optimum = problem_of(name), optimum_of(name)
    assert float(problem.mean_slope(optimum).norm()) < 1e-14
    points = torch.randn(2, problem.size, generator=torch.Generator().manual_seed(1)).double()
    for client, point, slope in zip((3, 7), points, problem.slopes_of((3, 7))(points), strict=True):
        count = int(problem.counts[client])
        at = point.clone().requires_grad_()
        margins = problem.rows[client, :count] @ at
        loss = torch.nn.functional.softplus(-margins).mean()
        loss = loss + problem.convexity / 2 * at.square().sum()
        torch.testing.assert_close(torch.autograd.grad(loss, at)[0], slope)
        hessian = torch.autograd.functional.hessian(
            lambda p, rows=problem.rows[client, :count]: torch.nn.functional.softplus(
                -(rows @ p)
            ).mean(),
            torch.zeros_like(point),
        )
        largest = float(torch.linalg.eigvalsh(hessian)[-1])
        assert largest + problem.convexity <= problem.smoothness * (1 + 1e-12)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("algorithm", ["scaffnew", "tamuna"])
def test_trajectories_are_the_same_on_one_to_four_ranks(name: str, algorithm: Algorithm) -> None:
    settings = FederationSettings(NUM_CLIENTS, cohort=4, sparsity=3, max_rounds=30)
    alone = run_ranks(1, partial(follow, name=name, algorithm=algorithm, settings=settings))[0]
    for size in (2, 3, 4):
        for trajectory in run_ranks(
            size, partial(follow, name=name, algorithm=algorithm, settings=settings)
        ):
            for end, expected in zip(trajectory.ends, alone.ends, strict=True):
                assert end.squared_distance == pytest.approx(expected.squared_distance, rel=1e-10)
                assert (end.sent, end.local_steps) == (expected.sent, expected.local_steps)


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("breast-cancer", 1000.0),
        ("digits", CONDITION),
        pytest.param("digits", 1000.0, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("sparsity", "cohort"), [(12, 12), (2, 12), (3, 4)])
def test_the_exact_optimum_is_found_and_control_variates_cancel(
    name: str, condition: float, sparsity: int, cohort: int
) -> None:
    problem = problem_of(name, condition=condition)
    optimum = optimum_of(name, condition=condition)

    def solve(world: World) -> float:
        rule = RoundRule.of_smoothness(
            problem.smoothness,
            problem.convexity,
            num_clients=NUM_CLIENTS,
            sparsity=sparsity,
            cohort=cohort,
        )
        clients = ClientRounds(torch.zeros_like(optimum), rule, world=world)
        while float((clients.shared - optimum).square().sum()) >= 1e-20:
            assert clients.num_rounds < 3000
            clients.run_together(problem.slopes_of)
            if clients.num_rounds % 20 == 0:
                total = control_sum(world, clients.controls, like=optimum)
                assert float(total.abs().max()) < 1e-12
        clients.close()
        return clients.num_rounds

    run_ranks(1, solve)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("condition", [CONDITION, 1000.0])
@pytest.mark.parametrize(("sparsity", "cohort"), [(12, 12), (2, 12), (2, 4), (3, 4)])
def test_ten_seeds_contract_as_the_theory_promises(
    name: str, condition: float, sparsity: int, cohort: int
) -> None:
    """Played by one process, with the rule's own draws: the exchange is compared elsewhere.

    A mean of logarithms is below the logarithm of the mean, for which `test_client_rounds.py` has
    an equality.
    """
    problem, optimum = problem_of(name, condition=condition), optimum_of(name, condition=condition)
    rounds = 40 if condition == CONDITION else 12  # of more steps each
    logs, steps = 0.0, 0
    for seed in range(10):
        rule = RoundRule.of_smoothness(
            problem.smoothness,
            problem.convexity,
            num_clients=NUM_CLIENTS,
            sparsity=sparsity,
            cohort=cohort,
            seed=seed,
        )
        found, taken = play(problem, rule, rounds)
        logs += math.log(float((found - optimum).square().sum() / optimum.square().sum()))
        steps += taken
    kept = 1 - rule.p**2 * (sparsity - 1) / (NUM_CLIENTS - 1)
    promised = -math.log(max((1 - rule.lr * problem.convexity) ** 2, kept))
    assert -logs / steps >= promised


def play(problem: LogisticProblem, rule: RoundRule, rounds: int) -> tuple[Tensor, int]:
    """What clients share after ``rounds``, and their steps, by the paper's algorithm as written."""
    shared = torch.zeros(problem.size, dtype=torch.float64)
    controls = torch.zeros(NUM_CLIENTS, problem.size, dtype=torch.float64)
    steps = 0
    for number in range(rounds):
        drawn = rule.draw(number)
        values, slopes = shared.repeat(rule.cohort, 1), problem.slopes_of(drawn.cohort)
        own = controls[list(drawn.cohort)]
        for _ in range(drawn.num_steps):
            values = values - rule.lr * (slopes(values) - own)
        places = torch.arange(problem.size) * rule.sparsity
        column = torch.arange(rule.cohort)[:, None]
        masks = ((column - places) % rule.cohort < rule.sparsity).double()
        shared = (masks * values).sum(0) / rule.sparsity
        change = rule.eta / rule.lr * masks * (shared - values)
        controls[list(drawn.cohort)] = own + change
        steps += drawn.num_steps
    return shared, steps


def test_averages_stall_where_gradient_descent_and_control_variates_arrive() -> None:
    settings = FederationSettings(NUM_CLIENTS, cohort=12, target=1e-6)

    def compare(world: World) -> list[Trajectory]:
        algorithms: tuple[Algorithm, ...] = ("gd", "fedavg", "scaffnew")
        return [follow(world, "breast-cancer", one, settings) for one in algorithms]

    descent, average, scaffnew = run_ranks(2, compare)[0]
    assert descent.has_arrived and scaffnew.has_arrived and not average.has_arrived
    assert average.ends[-1].squared_distance > 1e-4
    assert scaffnew.ends[-1].sent < 0.5 * descent.ends[-1].sent
    rule = descent.rule
    problem, point = problem_of("breast-cancer"), torch.zeros(31, dtype=torch.float64)
    for end in descent.ends:
        point = point - rule.lr * problem.mean_slope(point)
        expected = float((point - optimum_of("breast-cancer")).square().sum())
        assert end.squared_distance == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("convexity", "target", "arrives"), [(1e-4, 0.6, True), (1e-5, 1e-8, False)]
)
def test_slow_progress_goes_on_where_the_limit_is_far_enough(
    convexity: float, target: float, arrives: bool
) -> None:
    """Gradient descent that gains 8 % in 200 rounds, and one that is too slow by far."""

    def descend(world: World) -> Trajectory:
        return run_algorithm(
            "gd",
            FederationSettings(2, target=target),
            start=torch.ones(1, dtype=torch.float64),
            optimum=torch.zeros(1, dtype=torch.float64),
            smoothness=(1.0, convexity),
            slopes_of=lambda clients: lambda points: convexity * points,
            world=world,
        )

    (found,) = run_ranks(1, descend, progress="poll")
    contraction = (1 - found.rule.lr * convexity) ** 2
    assert found.has_arrived == arrives
    expected = math.ceil(math.log(target) / math.log(contraction)) if arrives else 1000
    assert found.ends[-1].rounds == expected


@pytest.mark.parametrize(
    ("start", "gain", "arrives"), [(1.0, 4e-3, True), (1e4, 4e-3, True), (1.0, 0.0, False)]
)
def test_distances_that_scatter_are_judged_by_their_trend(
    start: float, gain: float, arrives: bool
) -> None:
    """Those of masked averages begin far above the start, and come near again after long."""
    settings = FederationSettings(100)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(5000, generator=generator, dtype=torch.float64).exp()
        distances = (start * torch.exp(-gain * torch.arange(5000)) * noise).tolist()
        stops = [n for n in range(100, 5001, 100) if _is_hopeless(distances[:n], settings)]
        assert bool(stops) != arrives


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cohort"), [("breast-cancer", 10), ("digits", 4)])
def test_a_hundred_clients_send_a_third_with_masks_and_cohorts(name: str, cohort: int) -> None:
    """Numbers received count a tenth, as where the way down is faster."""
    problem, optimum = problem_of(name, 100, 1e4), optimum_of(name, 100, 1e4)
    settings = FederationSettings(100, cohort=cohort, sparsity=4, target=1e-8, down_weight=0.1)

    def compare(world: World) -> list[Trajectory]:
        names: tuple[Algorithm, ...] = ("scaffnew", "tamuna")
        return [
            run_algorithm(
                name,
                settings,
                start=torch.zeros_like(optimum),
                optimum=optimum,
                smoothness=(problem.smoothness, problem.convexity),
                slopes_of=problem.slopes_of,
                world=world,
            )
            for name in names
        ]

    scaffnew, tamuna = run_ranks(1, compare)[0]
    assert scaffnew.has_arrived and tamuna.has_arrived
    assert tamuna.cost(tamuna.ends[-1]) <= 0.35 * scaffnew.cost(scaffnew.ends[-1])


def test_rules_follow_from_the_algorithm() -> None:
    settings = FederationSettings(100, cohort=20)
    scaffnew, compressed, tamuna = (
        settings.rule(name, 100.0, 1.0) for name in ("scaffnew", "compressed-scaffnew", "tamuna")
    )
    assert (scaffnew.sparsity, scaffnew.cohort) == (100, 100)
    assert (scaffnew.p, tamuna.p) == pytest.approx((0.1, 0.5**0.5))
    assert (compressed.sparsity, compressed.cohort) == (2, 100)
    assert (tamuna.sparsity, tamuna.cohort) == (2, 20)
    average = settings.rule("fedavg", 100.0, 1.0)
    assert isinstance(average, AveragingRule) and average.eta == 0
    assert {average.draw(number).num_steps for number in range(9)} == {10}
    assert settings.rule("gd", 100.0, 1.0).draw(3).num_steps == 1
    one = FederationSettings(1).rule("tamuna", 100.0, 1.0)
    assert (one.sparsity, one.cohort) == (1, 1)


@pytest.mark.parametrize("more", [{"target": 0.0}, {"max_rounds": 0}, {"down_weight": -1.0}])
def test_settings_without_meaning_are_refused(more: dict[str, float]) -> None:
    with raises(ConfigError, "out-of-range"):
        FederationSettings(4, **more)  # type: ignore[arg-type]
    with raises(ConfigError, "out-of-range"):
        logistic_problem("digits", num_clients=0, condition=10.0)
    with raises(ConfigError, "out-of-range"):
        logistic_problem("digits", num_clients=4, condition=1.0)
