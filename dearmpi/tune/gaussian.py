"""Gaussian process: what a few noisy values of a smooth function say about all others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

_LENGTH_SCALES = (0.5, 1.0, 2.0, 4.0, 8.0)
_NOISES = (1e-4, 1e-2, 1e-1, 0.5)
_FEWEST_TO_FIT = 4  # fewer points fit anything


def matern(distance: Vector) -> Vector:
    """The Matern kernel with smoothness 5/2 (Rasmussen and Williams, 4.17), length scale 1."""
    scaled = math.sqrt(5.0) * np.abs(distance)
    kernel: Vector = (1.0 + scaled + scaled**2 / 3.0) * np.exp(-scaled)
    return kernel


@dataclass(frozen=True, slots=True)
class GaussianProcess:
    """What is known of a function of mean 0 and variance 1 after ``values`` at ``places``.

    length_scale: in units of the places. noise: variance of what is added to each value.
    """

    places: Vector
    values: Vector
    length_scale: float = 2.0
    noise: float = 1e-2

    def predict(self, at: Vector) -> tuple[Vector, Vector]:
        """Mean and standard deviation of the function at each of ``at`` (ibid., algorithm 2.1)."""
        factor = self._factor()
        cross = self._kernel(self.places, at)
        mean: Vector = cross.T @ self._weights(factor)
        explained = np.linalg.solve(factor, cross)
        variance = 1.0 - np.sum(explained**2, axis=0)
        return mean, np.sqrt(np.maximum(variance, 0.0))

    def log_likelihood(self) -> float:
        """How well the kernel explains the values (ibid., 2.30)."""
        factor = self._factor()
        fit = float(self.values @ self._weights(factor))
        volume = float(np.sum(np.log(np.diag(factor))))
        return -fit / 2 - volume - len(self.values) * math.log(2 * math.pi) / 2

    def _kernel(self, one: Vector, other: Vector) -> Vector:
        return matern((one[:, None] - other[None, :]) / self.length_scale)

    def _factor(self) -> Vector:
        """The lower Cholesky factor of the covariance of the values."""
        covariance = self._kernel(self.places, self.places)
        return np.asarray(np.linalg.cholesky(covariance + self.noise * np.eye(len(self.places))))

    def _weights(self, factor: Vector) -> Vector:
        weights: Vector = np.linalg.solve(factor.T, np.linalg.solve(factor, self.values))
        return weights


def fit(places: Sequence[float], values: Sequence[float]) -> GaussianProcess:
    """The process whose length scale and noise make ``values`` most likely, out of a small grid."""
    x, y = np.array(places, dtype=np.float64), np.array(values, dtype=np.float64)
    if len(x) < _FEWEST_TO_FIT:
        return GaussianProcess(x, y)
    tried = [GaussianProcess(x, y, *both) for both in product(_LENGTH_SCALES, _NOISES)]
    return max(tried, key=GaussianProcess.log_likelihood)
