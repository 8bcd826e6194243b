"""Bayesian search: the next cap is where a Gaussian process expects the most of a trial."""

from __future__ import annotations

import math

import numpy as np

from dearmpi.tune.gaussian import Vector, fit
from dearmpi.tune.search import Search, SearchSpace

XI = 0.1  # the paper's; in standard deviations of the speeds observed
_NUM_CANDIDATES = 129
_NUM_TRIALS = 10


class BayesianSearch(Search):
    """The paper's search: expected improvement over one variable.

    The process models speed (one over the time of an iteration) over the logarithm of the cap, in
    units of eighths of the way from lowest to highest: octaves, for 1 to 256 MiB. The first trial
    is the start, and no candidate is drawn at random, so every search is repeatable.
    """

    def __init__(
        self,
        space: SearchSpace | None = None,
        *,
        num_trials: int = _NUM_TRIALS,
        xi: float = XI,
    ) -> None:
        super().__init__(space, num_trials=num_trials)
        self._xi = xi

    def _next_cap(self) -> int:
        if not self._trials:
            return self.space.start_bytes
        shares = np.linspace(0.0, 1.0, _NUM_CANDIDATES)
        speeds = np.array([1.0 / trial.seconds for trial in self._trials])
        values = (speeds - speeds.mean()) / (speeds.std() or 1.0)
        process = fit([8.0 * self._share(trial.cap_bytes) for trial in self._trials], list(values))
        mean, deviation = process.predict(8.0 * shares)
        expected = expected_improvement(mean, deviation, best=float(values.max()), xi=self._xi)
        # Where nothing is expected anywhere, what is known least is tried.
        chosen = max(range(_NUM_CANDIDATES), key=lambda i: (expected[i], deviation[i]))
        return self.space.cap_bytes(float(shares[chosen]))

    def _share(self, cap_bytes: int) -> float:
        """Where ``cap_bytes`` lies between lowest and highest: ``SearchSpace.cap_bytes`` undone."""
        space = self.space
        whole = math.log(space.highest_bytes / space.lowest_bytes)
        return math.log(cap_bytes / space.lowest_bytes) / whole if whole else 0.0


def expected_improvement(mean: Vector, deviation: Vector, *, best: float, xi: float) -> Vector:
    """How far a trial is expected to exceed ``best + xi``, counting those that do not as 0.

    mean, deviation: of what is known about each candidate (Jones et al., 1998, equation 15).
    """
    gain = mean - best - xi
    certain = np.maximum(gain, 0.0)
    scaled = gain / np.maximum(deviation, 1e-12)
    density = np.exp(-(scaled**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([(1 + math.erf(z / math.sqrt(2))) / 2 for z in scaled])
    uncertain: Vector = gain * below + deviation * density
    return np.where(deviation > 1e-12, uncertain, certain)
