"""Costs: fitted from samples, carried over to other world sizes, and two operations in flight."""

from __future__ import annotations

import math
import random

import pytest

from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import ParamSpec
from dearmpi.plan.model.cost import MOST_RANKS, MOST_S, Costs, LinkModel, fit_link, ring_cost
from dearmpi.plan.search.planner import make_plan
from tests.codes import raises
from tests.unit.plan.small import equal

SIZES = [1e4, 1e5, 1e6, 4e6, 25e6]
TRUE = LinkModel(1e-3, 8e-9)


def samples(link: LinkModel) -> list[tuple[float, float]]:
    return [(nbytes, link.alone_s(nbytes)) for nbytes in SIZES]


def test_exact_samples_are_fitted_exactly() -> None:
    fit = fit_link(samples(TRUE))
    assert fit.link.alpha_s == pytest.approx(TRUE.alpha_s)
    assert fit.link.beta_s_per_byte == pytest.approx(TRUE.beta_s_per_byte)
    assert fit.relative_error < 1e-6


def test_noise_and_an_outlier_do_little_and_the_error_tells_of_them() -> None:
    chance = random.Random(5)
    noisy = [(n, s * chance.uniform(0.98, 1.02)) for n, s in samples(TRUE) * 4]
    fit = fit_link(noisy)
    assert fit.link.beta_s_per_byte == pytest.approx(TRUE.beta_s_per_byte, rel=0.03)
    assert 0.001 < fit.relative_error < 0.03
    spoilt = fit_link([*noisy, (1e6, 10 * TRUE.alone_s(1e6))])
    assert spoilt.link.beta_s_per_byte == pytest.approx(TRUE.beta_s_per_byte, rel=0.05)
    assert spoilt.link.alpha_s == pytest.approx(TRUE.alpha_s, rel=0.05)
    assert spoilt.relative_error > 0.1


def test_neither_part_is_negative() -> None:
    bent_up = fit_link([(1e6, 0.5), (2e6, 2.0)]).link
    assert bent_up.alpha_s == 0 and bent_up.beta_s_per_byte > 0
    falling = fit_link([(1e6, 2.0), (2e6, 1.0)]).link
    assert falling.beta_s_per_byte == 0 and falling.alpha_s > 0


def test_two_in_flight_hide_each_others_latency_but_share_the_wire() -> None:
    small, large = 1000, 10**8
    assert TRUE.pair_s(small) == TRUE.alone_s(small)
    assert TRUE.pair_s(large) == pytest.approx(2 * TRUE.beta_s_per_byte * large)


def test_a_pair_tells_how_much_of_the_time_is_the_wires() -> None:
    seconds = 2 * 0.8 * TRUE.beta_s_per_byte * 25e6
    link = fit_link(samples(TRUE), pairs=[(1e4, 9.0), (25e6, seconds)]).link
    assert link.wire_share == pytest.approx(0.8)
    assert link.pair_s(25e6) == pytest.approx(seconds)
    for factor, share in ((0.1, 0.5), (9.0, 1.0)):
        pair = (25e6, factor * TRUE.alone_s(25e6))
        assert fit_link(samples(TRUE), pairs=[pair]).link.wire_share == share


def test_a_ring_has_one_round_less_than_ranks() -> None:
    four = ring_cost(1e-3, 8e-9, 4)
    assert four.alpha_s == pytest.approx(3e-3) and four.beta_s_per_byte == pytest.approx(6e-9)
    assert ring_cost(1e-3, 8e-9, 1) == LinkModel(0.0, 0.0)


def test_costs_are_carried_over_to_another_world_size() -> None:
    def costs(world_size: int) -> Costs:
        ring = ring_cost(1e-3, 8e-9, world_size)
        return Costs(world_size, ring, ring, update_s=1e-3)

    far = costs(4).at(4096)
    assert far.world_size == 4096 and far.update_s == 1e-3
    expected = costs(4096).all_gather
    assert far.all_gather.alpha_s == pytest.approx(expected.alpha_s)
    assert far.all_gather.beta_s_per_byte == pytest.approx(expected.beta_s_per_byte)
    with raises(ConfigError, "costs-of-other-world", 1, 4):
        costs(1).at(4)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ([], ("0",)),
        ([(1e6, 1.0)], ("1",)),
        ([(1e6, 1.0), (1e6, 1.1)], ("2",)),
        ([(1e6, 1.0), (2e6, math.nan)], ("2000000.0",)),
        ([(1e6, 1.0), (2e6, -1.0)], ("-1.0",)),
        ([(0, 1.0), (2e6, 1.0)], ("0",)),
    ],
)
def test_samples_that_say_nothing_are_refused(
    bad: list[tuple[float, float]], told: tuple[str, ...]
) -> None:
    with raises(ConfigError, "samples-misfit", *told):
        fit_link(bad)


def test_costs_that_are_none_are_refused() -> None:
    with raises(ConfigError, "out-of-range", "alpha_s is"):
        LinkModel(math.nan, 0)
    with raises(ConfigError, "out-of-range", "beta_s_per_byte is", "-1"):
        LinkModel(0, -1)
    with raises(ConfigError, "out-of-range", "wire_share is", "0.4"):
        LinkModel(0, 1, wire_share=0.4)
    with raises(ConfigError, "out-of-range", "main_thread_s is"):
        Costs(4, TRUE, TRUE, main_thread_s=math.inf)
    with raises(ConfigError, "out-of-range", "size is", 0):
        Costs(0, TRUE, TRUE)


def test_costs_end_where_they_could_not_be_summed_and_not_before() -> None:
    with raises(ConfigError, "out-of-range", "beta_s_per_byte is", "1e+305", 0):
        LinkModel(0, 1e305)
    with raises(ConfigError, "out-of-range", "update_s_per_byte is", "1e+305", 0):
        Costs(4, TRUE, TRUE, update_s_per_byte=1e305)
    longest = Costs(2, LinkModel(MOST_S, MOST_S), LinkModel(MOST_S, MOST_S), MOST_S, MOST_S, MOST_S)
    made = make_plan(equal(2), longest.at(MOST_RANKS), world_size=MOST_RANKS, eager=True)
    assert math.isfinite(made.prediction.iteration_s)


def test_times_that_fall_with_size_leave_the_rate_of_the_pairs() -> None:
    """Noise may make a small message the slowest; the wire still has a rate."""
    fit = fit_link([(1e4, 3e-3), (1e6, 1e-3)], pairs=[(1e4, 3e-3), (1e6, 4e-3)])
    assert fit.link.beta_s_per_byte == pytest.approx(2e-9)
    assert fit.link.wire_share == 1
    # The line that is kept is told of, not the one that the samples alone would give.
    assert fit.relative_error == pytest.approx(1.61, abs=0.01)


def test_latency_that_hides_the_wire_is_not_taken_for_it() -> None:
    """Two operations in flight that take no longer than one have not filled the wire."""
    link = LinkModel(15e-3, 6e-10)
    few = [(n, link.alone_s(n)) for n in (2**16, 2**19)]
    for slower in (1.0, 1.1):
        fit = fit_link(few, pairs=[(n, slower * seconds) for n, seconds in few])
        assert fit.link.beta_s_per_byte == pytest.approx(link.beta_s_per_byte)
        assert fit.link.alpha_s == pytest.approx(link.alpha_s)
        assert fit.relative_error < 1e-6


def test_costs_measured_in_half_precision_hold_for_tensors_that_are_sent_as_they_are() -> None:
    costs = Costs(4, TRUE, TRUE)
    single, half = ParamSpec("a", (10,)), ParamSpec("b", (980,), 2, "bfloat16")
    assert costs.of_fp32_for([single]) == costs
    slope = costs.of_fp32_for([single, half]).all_gather.beta_s_per_byte
    assert slope == pytest.approx(2 * 1980 / 2000 * TRUE.beta_s_per_byte)
    idle = ParamSpec("d", (99,), trained=False)
    slope = costs.of_fp32_for([idle, half]).all_gather.beta_s_per_byte
    assert slope == pytest.approx(2 * TRUE.beta_s_per_byte)
    assert costs.of_fp32_for([idle]) == costs
    double = ParamSpec("c", (10,), 8, "float64")
    slope = costs.of_fp32_for([double]).reduce_scatter.beta_s_per_byte
    assert slope == pytest.approx(TRUE.beta_s_per_byte / 2)


def test_half_precision_takes_half_the_time_of_fp32_bytes_and_the_same_start_up() -> None:
    costs = Costs(4, TRUE, TRUE.scaled(alpha=2, beta=3), update_s_per_byte=1e-9)
    single, double = ParamSpec("a", (10,)), ParamSpec("b", (10,), 8, "float64")
    idle = ParamSpec("c", (99,), trained=False)
    half = ParamSpec("d", (20,), 2, "bfloat16")
    assert costs.sent_as("fp32", [single]) is costs
    for specs, share in (([single, idle], 0.5), ([double], 0.25), ([single, half], 0.75)):
        found = costs.sent_as("bf16", specs)
        assert found.reduce_scatter == TRUE.scaled(alpha=1, beta=share)
        assert found.all_gather == costs.all_gather.scaled(alpha=1, beta=share)
        assert found.update_s_per_byte == costs.update_s_per_byte
    with raises(ConfigError, "setting-without-effect", "'fp16'"):
        costs.sent_as("fp16", [half, idle])
