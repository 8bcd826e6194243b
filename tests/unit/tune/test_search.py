from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.searches import GridSearch, RandomSearch
from dearmpi.comm.world import World
from dearmpi.config import MIB
from dearmpi.errors import ConfigError, DearError, UsageError
from dearmpi.tune.search import (
    BayesianSearch,
    GaussianProcess,
    Search,
    SearchSpace,
    SharedSearch,
    expected_improvement,
    fit,
    matern,
    write_trials,
)
from tests.fakes.ranks import run_ranks

KINDS = (BayesianSearch, GridSearch, RandomSearch)


def make(kind: Callable[..., Search], *, num_trials: int = 10) -> Search:
    return kind(num_trials=num_trials)


def iteration_s(cap_bytes: int, *, fastest_mb: float) -> float:
    """Small buckets cost start-ups, large ones cannot be hidden; least at ``fastest_mb``."""
    ratio = cap_bytes / MIB / fastest_mb
    return 0.5 + 0.1 * (ratio + 1 / ratio)


def carry_out(search: Search, seconds: Callable[[int], float]) -> Search:
    while not search.is_done:
        cap_bytes = search.suggest()
        search.observe(cap_bytes, seconds(cap_bytes))
    return search


@pytest.mark.parametrize("fastest_mb", [1.0, 4.0, 25.0, 150.0])
def test_bayesian_search_comes_within_two_percent_in_ten_trials(fastest_mb: float) -> None:
    search = carry_out(
        make(BayesianSearch), lambda cap_bytes: iteration_s(cap_bytes, fastest_mb=fastest_mb)
    )
    assert search.best.seconds <= 1.02 * 0.7
    assert search.trials[0].cap_bytes == 25 * MIB


@pytest.mark.parametrize("seed", range(5))
def test_bayesian_search_does_so_with_noise(seed: int) -> None:
    noise = random.Random(seed)

    def seconds(cap_bytes: int) -> float:
        return iteration_s(cap_bytes, fastest_mb=6.0) * noise.gauss(1.0, 0.01)

    best = carry_out(make(BayesianSearch), seconds).best
    assert iteration_s(best.cap_bytes, fastest_mb=6.0) <= 1.03 * 0.7


@pytest.mark.parametrize("kind", KINDS)
def test_every_search_stays_inside_and_repeats_itself(kind: Callable[..., Search]) -> None:
    space = SearchSpace(2 * MIB, 40 * MIB, 3 * MIB)
    caps = [
        [
            trial.cap_bytes
            for trial in carry_out(kind(space, num_trials=12), lambda cap: 1 + 1 / cap).trials
        ]
        for _ in range(2)
    ]
    assert caps[0] == caps[1]
    assert all(2 * MIB <= cap <= 40 * MIB for cap in caps[0])
    assert len(set(caps[0])) > 4


def test_a_search_where_nothing_matters_looks_everywhere() -> None:
    search = carry_out(make(BayesianSearch), lambda cap_bytes: 1.0)
    caps = sorted(trial.cap_bytes / MIB for trial in search.trials)
    gaps = [math.log2(after / before) for before, after in zip(caps, caps[1:], strict=False)]
    assert caps[0] < 2 and caps[-1] > 128 and max(gaps) < 3


def test_a_grid_has_equal_ratios() -> None:
    search = carry_out(make(GridSearch, num_trials=9), lambda cap_bytes: 1.0)
    assert [trial.cap_bytes for trial in search.trials] == [2**n * MIB for n in range(9)]


def test_random_searches_of_other_seeds_differ() -> None:
    assert RandomSearch(num_trials=3).suggest() != RandomSearch(num_trials=3, seed=1).suggest()


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_that_is_done_suggests_the_best(kind: Callable[..., Search]) -> None:
    search = carry_out(
        make(kind, num_trials=4), lambda cap_bytes: iteration_s(cap_bytes, fastest_mb=20.0)
    )
    assert search.suggest() == search.best.cap_bytes
    assert search.best.seconds == min(trial.seconds for trial in search.trials)


def test_expected_improvement_is_as_solved_by_hand() -> None:
    at_best, sure, hopeless = expected_improvement(
        np.array([0.5, 2.0, -1.0]), np.array([2.0, 0.0, 0.0]), best=0.4, xi=0.1
    )
    assert at_best == pytest.approx(2.0 / math.sqrt(2 * math.pi))
    assert sure == pytest.approx(1.5)
    assert hopeless == 0.0


def test_a_larger_xi_explores_more() -> None:
    mean, deviation = np.array([1.0, 0.8]), np.array([0.05, 0.3])
    near = expected_improvement(mean, deviation, best=0.9, xi=0.0) / deviation
    far = expected_improvement(mean, deviation, best=0.9, xi=0.5)
    assert near[0] > near[1] and far[0] < far[1]


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"26214400 bytes took .* s"):
        make(GridSearch).observe(25 * MIB, seconds)


def test_a_start_outside_is_refused() -> None:
    with pytest.raises(ConfigError, match="from 10 to 20 bytes cannot start at 30"):
        SearchSpace(10, 20, 30)


def test_no_trials_are_refused_and_none_is_the_best() -> None:
    with pytest.raises(ConfigError, match="0 trials"):
        make(GridSearch, num_trials=0)
    with pytest.raises(UsageError, match="nothing was observed"):
        _ = make(GridSearch).best


def test_the_log_marks_the_best_row(tmp_path: Path) -> None:
    search = make(GridSearch, num_trials=3)
    for cap_mb, seconds in ((1, 0.3), (16, 0.125), (256, 0.125)):
        search.observe(cap_mb * MIB, seconds)
    write_trials(tmp_path / "trials.csv", search)
    rows = list(csv.reader((tmp_path / "trials.csv").open()))
    assert rows == [
        ["trial", "bucket_cap_mb", "iteration_s", "best"],
        ["1", "1.0000", "0.300000", ""],
        ["2", "16.0000", "0.125000", "*"],
        ["3", "256.0000", "0.125000", ""],
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["trials.csv"]


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    search = make(GridSearch, num_trials=3)
    search.observe(MIB, 0.3)
    with pytest.raises(DearError, match="no/trials.csv"):
        write_trials(tmp_path / "no" / "trials.csv", search)


def test_all_ranks_try_what_rank_0_suggests_and_the_slowest_counts(tmp_path: Path) -> None:
    def search_on(world: World) -> list[tuple[int, float]]:
        own = BayesianSearch() if world.is_root else RandomSearch(num_trials=10, seed=world.rank)
        shared = SharedSearch(world, own, log=tmp_path / "trials.csv")
        while not shared.is_done:
            cap_bytes = shared.suggest()
            shared.observe(
                cap_bytes, iteration_s(cap_bytes, fastest_mb=8.0) + 0.1 * (world.rank == 1)
            )
        return [(trial.cap_bytes, trial.seconds) for trial in shared.trials]

    results = run_ranks(3, search_on)
    assert results[0] == results[1] == results[2]
    alone = carry_out(
        BayesianSearch(), lambda cap_bytes: iteration_s(cap_bytes, fastest_mb=8.0) + 0.1
    )
    assert results[0] == [(trial.cap_bytes, trial.seconds) for trial in alone.trials]
    assert len((tmp_path / "trials.csv").read_text().splitlines()) == 11


def test_the_kernel_is_one_here_and_nothing_far_away() -> None:
    near, one, far = matern(np.array([0.0, -1.0, 50.0]))
    assert near == 1.0
    assert one == pytest.approx((1 + math.sqrt(5) + 5 / 3) * math.exp(-math.sqrt(5)))
    assert far < 1e-40


def test_the_posterior_after_one_value_is_as_solved_by_hand() -> None:
    process = GaussianProcess(np.array([2.0]), np.array([3.0]), length_scale=4.0, noise=0.5)
    mean, deviation = process.predict(np.array([2.0, 6.0]))
    k = matern(np.array([1.0]))[0]
    assert mean == pytest.approx([3.0 / 1.5, k * 3.0 / 1.5])
    assert deviation == pytest.approx([math.sqrt(1 - 1 / 1.5), math.sqrt(1 - k * k / 1.5)])


def test_the_posterior_and_the_likelihood_after_two_values_are_as_solved_by_hand() -> None:
    one, other, noise = 1.0, -2.0, 0.25
    process = GaussianProcess(
        np.array([0.0, 1.0]), np.array([one, other]), length_scale=1.0, noise=noise
    )
    a = matern(np.array([1.0]))[0]
    k, m = matern(np.array([3.0]))[0], matern(np.array([2.0]))[0]
    d = (1 + noise) ** 2 - a**2  # the inverse of ((1 + n, a), (a, 1 + n)) is ((1 + n, -a), ...) / d
    weights = (((1 + noise) * one - a * other) / d, ((1 + noise) * other - a * one) / d)
    explained = ((1 + noise) * (k * k + m * m) - 2 * a * k * m) / d
    mean, deviation = process.predict(np.array([3.0]))
    assert mean == pytest.approx([k * weights[0] + m * weights[1]])
    assert deviation == pytest.approx([math.sqrt(1 - explained)])
    misfit = one * weights[0] + other * weights[1]
    assert process.log_likelihood() == pytest.approx(
        -misfit / 2 - math.log(d) / 2 - math.log(2 * math.pi)
    )


def test_without_noise_it_passes_through_the_values() -> None:
    places = np.array([0.0, 1.0, 3.0, 7.0])
    values = np.array([1.0, -1.0, 0.5, 0.0])
    process = GaussianProcess(places, values, noise=1e-12)
    mean, deviation = process.predict(places)
    assert mean == pytest.approx(values, abs=1e-6)
    assert deviation == pytest.approx(0.0, abs=1e-4)


def test_the_fit_tells_a_smooth_function_from_noise() -> None:
    draw = random.Random(0)
    places = np.arange(24.0) / 3
    smooth = fit(list(places), list(np.sin(places)))
    noisy = fit(list(places), [draw.gauss(0.0, 1.0) for _ in places])
    assert smooth.noise < 0.01 and smooth.length_scale >= 2.0
    assert noisy.noise == 0.5
