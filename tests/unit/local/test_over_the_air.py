"""Over-the-air aggregation in simulation: unbiased, with the error that theory gives."""

from __future__ import annotations

import pytest
import torch

from dearmpi.errors import ConfigError
from dearmpi.local.over_the_air import SimulatedAirSum
from tests.codes import raises


@pytest.mark.parametrize(("threshold", "noise_std"), [(0.0, 0.5), (0.4, 0.0), (0.2, 0.3)])
def test_the_estimate_is_unbiased_with_the_error_of_theory(
    threshold: float, noise_std: float
) -> None:
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(8, 30, generator=generator, dtype=torch.float64) + 1
    air, count = SimulatedAirSum(threshold, noise_std), 4000
    found = torch.stack([air.mean(values, generator) for _ in range(count)])
    errors = found - values.mean(0)
    measured = float(errors.square().sum(1).mean())
    assert measured == pytest.approx(air.variance(values), rel=0.06)
    # Six standard deviations of the mean of as many estimates, over all coordinates.
    assert float(errors.mean(0).square().sum()) < 36 * air.variance(values) / count


def test_without_fading_and_noise_it_is_the_mean() -> None:
    values = torch.arange(12.0).view(3, 4)
    found = SimulatedAirSum(0.0, 0.0).mean(values, torch.Generator())
    torch.testing.assert_close(found, values.mean(0))
    assert SimulatedAirSum(0.0, 0.0).variance(values) == 0


@pytest.mark.parametrize("settings", [{"threshold": -1.0}, {"noise_std": float("inf")}])
def test_numbers_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with raises(ConfigError, "out-of-range"):
        SimulatedAirSum(**settings)
