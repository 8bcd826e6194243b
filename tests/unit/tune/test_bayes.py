from __future__ import annotations

import math
import random

import numpy as np
import pytest

from dearmpi.tune.bayes import GaussianProcess, fit, matern


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
