"""Search: which bucket caps to try, one after the other, to find the fastest."""

from __future__ import annotations

import csv
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dearmpi.comm.world import World
from dearmpi.config import MIB
from dearmpi.errors import ConfigError, DearError, UsageError


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The bucket caps that may be tried; by default those of the paper."""

    lowest_bytes: int = 1 * MIB
    highest_bytes: int = 256 * MIB
    start_bytes: int = 25 * MIB

    def __post_init__(self) -> None:
        if not 0 < self.lowest_bytes <= self.start_bytes <= self.highest_bytes:
            raise ConfigError(
                f"a search from {self.lowest_bytes} to {self.highest_bytes} bytes cannot start at "
                f"{self.start_bytes}; the start must lie between, and all must be above 0",
                code="out-of-range",
            )

    def cap_bytes(self, share: float) -> int:
        """The cap at ``share`` of the way, 0 to 1, from lowest to highest.

        Equal ways are equal ratios: from 1 to 2 MiB changes as much as from 100 to 200.
        """
        ratio = self.highest_bytes / self.lowest_bytes
        return round(self.lowest_bytes * math.pow(ratio, share))


@dataclass(frozen=True, slots=True)
class Trial:
    """An iteration took ``seconds`` with buckets of about ``cap_bytes``."""

    cap_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ConfigError(
                f"an iteration with buckets of {self.cap_bytes} bytes took {self.seconds} s; the "
                "time must be a number above 0",
                code="measurement-flawed",
            )


class Search(ABC):
    """Suggests caps, and takes in how long iterations with them took.

    The same observations give the same suggestions, on every rank and in every run.
    """

    def __init__(self, space: SearchSpace | None = None, *, num_trials: int) -> None:
        if num_trials < 1:
            raise ConfigError(
                f"a search of {num_trials} trials finds nothing; give 1 at least",
                code="out-of-range",
            )
        self.space = space or SearchSpace()
        self.num_trials = num_trials
        self._trials: list[Trial] = []

    @property
    def trials(self) -> Sequence[Trial]:
        return tuple(self._trials)

    @property
    def is_done(self) -> bool:
        return len(self._trials) >= self.num_trials

    @property
    def best(self) -> Trial:
        """The fastest trial; the earliest of several. Raises UsageError before the first."""
        if not self._trials:
            raise UsageError(
                "nothing was observed yet: no cap is the best", code="measurement-too-short"
            )
        return min(self._trials, key=lambda trial: trial.seconds)

    def suggest(self) -> int:
        """The cap to try next, in bytes; the best once the search is done."""
        return self.best.cap_bytes if self.is_done else self._next_cap()

    def observe(self, cap_bytes: int, seconds: float) -> None:
        """An iteration took ``seconds`` with ``cap_bytes``. Raises ConfigError for no time."""
        self._trials.append(Trial(cap_bytes, seconds))

    @abstractmethod
    def _next_cap(self) -> int: ...


def write_trials(path: Path, search: Search) -> None:
    """Write all trials as CSV, the best row marked ``*``; replaces the file in one piece.

    Raises DearError if it cannot be written.
    """
    rows = [
        (number, f"{trial.cap_bytes / MIB:.4f}", f"{trial.seconds:.6f}", trial is search.best)
        for number, trial in enumerate(search.trials, start=1)
    ]
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("trial", "bucket_cap_mb", "iteration_s", "best"))
            writer.writerows((*row[:3], "*" if row[3] else "") for row in rows)
        os.replace(partial, path)
    except OSError as error:
        raise DearError(
            f"cannot write the search's log {path}: {error}", code="cannot-write"
        ) from error


class SharedSearch:
    """``search`` on all ranks of ``world``: rank 0 suggests, and the slowest rank's time counts.

    log: a CSV file that rank 0 writes anew after every trial.
    """

    def __init__(self, world: World, search: Search, *, log: Path | None = None) -> None:
        self._world = world
        self._search = search
        self._log = log

    @property
    def is_done(self) -> bool:
        return self._search.is_done

    @property
    def best(self) -> Trial:
        """The fastest trial. Raises UsageError before the first."""
        return self._search.best

    @property
    def trials(self) -> Sequence[Trial]:
        return self._search.trials

    def suggest(self) -> int:
        """The cap to try next, in bytes, as rank 0 chooses it (collective).

        Ranks with other processors may round otherwise, so that each by itself could choose
        another cap.
        """
        own = str(self._search.suggest()) if self._world.is_root else ""
        return int(self._world.broadcast_text(own))

    def observe(self, cap_bytes: int, seconds: float) -> None:
        """An iteration with ``cap_bytes`` took ``seconds`` on this rank (collective)."""
        slowest = self._world.all_reduce([seconds], "max")[0]
        self._search.observe(cap_bytes, slowest)
        if self._log is not None and self._world.is_root:
            write_trials(self._log, self._search)


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


XI = 0.1  # the paper's; in standard deviations of the speeds observed
_NUM_CANDIDATES = 129
_NUM_TRIALS = 10


class BayesianSearch(Search):
    """The paper's search: expected improvement over one variable.

    The process models speed, which is one over the time of an iteration, over the logarithm of the
    cap. Its units are eighths of the way from lowest to highest: octaves, for 1 to 256 MiB. The
    first trial is the start, and no candidate is drawn at random, so every search is repeatable.
    """

    def __init__(self, space: SearchSpace | None = None, *, num_trials: int = _NUM_TRIALS) -> None:
        super().__init__(space, num_trials=num_trials)

    def _next_cap(self) -> int:
        if not self._trials:
            return self.space.start_bytes
        shares = np.linspace(0.0, 1.0, _NUM_CANDIDATES)
        speeds = np.array([1.0 / trial.seconds for trial in self._trials])
        values = (speeds - speeds.mean()) / (speeds.std() or 1.0)
        process = fit([8.0 * self._share(trial.cap_bytes) for trial in self._trials], list(values))
        mean, deviation = process.predict(8.0 * shares)
        expected = expected_improvement(mean, deviation, best=float(values.max()), xi=XI)
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
