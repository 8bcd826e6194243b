"""Searched: this engine with the bucket cap that a Bayesian search finds, as the paper does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dearmpi import DistributedOptimizer
from dearmpi.bench.method import Entrant, Setup, check_precision, ours
from dearmpi.config import MIB
from dearmpi.errors import ConfigError
from dearmpi.train.run.planning import NUM_TRIALS, CapSearch


class SearchedSteps:
    """``optimizer``, whose steps ``search`` times."""

    def __init__(self, optimizer: DistributedOptimizer, search: CapSearch) -> None:
        self._optimizer, self._search = optimizer, search

    def zero_grad(self) -> None:
        """As the optimizer does."""
        self._optimizer.zero_grad()

    def step(self) -> Any:
        """A step of the optimizer, after which the search may lay out other buckets."""
        result = self._optimizer.step()
        self._search.stepped()
        return result


def bayes(setup: Setup) -> Entrant:
    """DeAR's order with the best of ten caps, which are tried in iterations that do not count."""
    check_bayes(setup)
    entrant = ours("dear")(setup)
    optimizer = entrant.optimizer
    assert isinstance(optimizer, DistributedOptimizer)
    search = CapSearch(optimizer, setup.world)
    return replace(
        entrant,
        optimizer=SearchedSteps(optimizer, search),
        is_tuning=lambda: search.best is None,
        describe=lambda: _describe(search),
    )


def check_bayes(setup: Setup) -> None:
    """Raise ConfigError where nothing can be searched for."""
    check_precision(setup)
    if setup.world.size == 1:
        raise ConfigError(
            "one rank sends nothing, so that no bucket cap is better than another; start several "
            "with mpirun, or leave bayes out"
        )


def refuse_cap(options: Mapping[str, str]) -> None:
    """Raise ConfigError where a bucket cap is given, which the search is to find."""
    given = [name for name in ("cap", "bucket_cap_mb") if name in options]
    if given:
        raise ConfigError(
            f"bayes searches for the bucket cap, but {options[given[0]]} MiB is given; leave it "
            f"out, or measure dear:{options[given[0]]}"
        )


def _describe(search: CapSearch) -> str:
    if (best := search.best) is None:
        return ""
    return (
        f"{best.cap_bytes / MIB:.3g} MiB, the best of {NUM_TRIALS} caps, "
        f"{best.seconds:.4f} s in its trial"
    )
