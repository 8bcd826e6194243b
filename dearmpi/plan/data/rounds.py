"""Rounds of Scaffnew, CompressedScaffnew and TAMUNA: who takes part, for how long, sending what.

All follows from a seed, so that every rank knows it of all clients without a message.
Source: TAMUNA, arXiv 2302.09832; CompressedScaffnew (``cohort`` is all) 2210.13277; Scaffnew
(``sparsity`` is all, too) 2202.09357; FedAvg, without control variates, 1602.05629.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from dearmpi.errors import ConfigError
from dearmpi.plan.data.local_schedule import check_count


@dataclass(frozen=True, slots=True)
class Round:
    """cohort: clients that take part, by the column of the mask that each one has. num_steps: the
    local steps of each.
    """

    cohort: tuple[int, ...]
    num_steps: int


@dataclass(frozen=True, slots=True)
class RoundRule:
    """The settings of the algorithm.

    num_clients: n. lr: of local steps, gamma. p: the chance that a step is a round's last.
    sparsity: s, clients that send a coordinate. cohort: c, clients that take part in a round.

    Raises ConfigError unless 2 <= s <= c <= n, or all are 1, and 0 < p <= 1.
    """

    num_clients: int
    lr: float
    p: float
    sparsity: int
    cohort: int
    seed: int = 0

    def __post_init__(self) -> None:
        least = min(2, self.num_clients)
        for name, at_least in (("num_clients", 1), ("sparsity", least), ("cohort", least)):
            check_count(name, getattr(self, name), at_least)
        if not self.sparsity <= self.cohort <= self.num_clients:
            raise ConfigError(
                f"sparsity is {self.sparsity}, cohort {self.cohort}, and there are "
                f"{self.num_clients} clients; give sparsity <= cohort <= clients",
                code="out-of-range",
            )
        if not 0 < self.p <= 1:
            raise ConfigError(f"p is {self.p}; it must be above 0, at most 1", code="out-of-range")
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"lr is {self.lr}; it must be above 0", code="out-of-range")

    @classmethod
    def of_smoothness(
        cls,
        smoothness: float,
        convexity: float,
        *,
        num_clients: int,
        sparsity: int,
        cohort: int,
        seed: int = 0,
    ) -> RoundRule:
        """The paper's lr and p for functions that are L-smooth and mu-strongly convex."""
        if not 0 < convexity <= smoothness < math.inf:
            raise ConfigError(
                f"smoothness is {smoothness} and convexity {convexity}; give 0 < convexity <= "
                "smoothness",
                code="out-of-range",
            )
        p = min(1.0, math.sqrt(num_clients * convexity / (sparsity * smoothness)))
        lr = 2 / (smoothness + convexity)
        return cls(num_clients, lr, p, sparsity, cohort, seed)

    @property
    def eta(self) -> float:
        """By which control variates follow; times lr, 1 / lr of it."""
        n, s = self.num_clients, self.sparsity
        return 0.0 if n == 1 else self.p * n * (s - 1) / (s * (n - 1))

    def draw(self, number: int) -> Round:
        """Round ``number``, from 0: a cohort in random order, and a geometric number of steps."""
        random = Random(f"{self.seed}/{number}")
        cohort = tuple(random.sample(range(self.num_clients), self.cohort))
        if self.p == 1:
            return Round(cohort, 1)
        steps = 1 + math.floor(math.log(1 - random.random()) / math.log1p(-self.p))
        return Round(cohort, steps)


class AveragingRule(RoundRule):
    """The same rounds without control variates, with ``1 / p`` local steps in each.

    It is FedAvg; with p = 1 and all clients it is gradient descent.
    """

    __slots__ = ()

    @property
    def eta(self) -> float:
        """Control variates stay zero."""
        return 0.0

    def draw(self, number: int) -> Round:
        """As the base class, with the same number of steps in each round."""
        return Round(RoundRule.draw(self, number).cohort, round(1 / self.p))
