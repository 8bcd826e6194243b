"""Federation: algorithms for clients side by side, by numbers sent until the optimum is near."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal, get_args

from torch import Tensor

from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from dearmpi.local.client_rounds import ClientRounds, Slopes
from dearmpi.plan.data.local_schedule import AveragingRule, RoundRule

Algorithm = Literal["gd", "fedavg", "scaffnew", "compressed-scaffnew", "tamuna"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
_CHECKED_EVERY, _LEAST_ROUNDS, _MOST_SPEED_UP = 100, 1000, 4.0  # before one is given up


@dataclass(frozen=True, slots=True)
class FederationSettings:
    """What is common to the algorithms of a comparison.

    cohort: clients in a round of FedAvg and TAMUNA; None: a tenth, and at least 2. sparsity: of
    CompressedScaffnew and TAMUNA. p: chance that a local step is a round's last; None: the
    paper's; FedAvg takes 1 / p steps. target: squared distance to the optimum at which to stop.
    down_weight: cost of a number that a client receives, beside 1 of one that it sends.
    """

    num_clients: int
    cohort: int | None = None
    sparsity: int = 2
    p: float | None = None
    target: float = 1e-8
    max_rounds: int = 20_000
    down_weight: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, is_good in (
            ("target", self.target, 0 < self.target < math.inf),
            ("max_rounds", self.max_rounds, self.max_rounds >= 1),
            ("down_weight", self.down_weight, 0 <= self.down_weight < math.inf),
        ):
            if not is_good:
                raise ConfigError(
                    f"{name} is {value}; it must be finite, and "
                    + ("0 or more" if name == "down_weight" else "above 0"),
                    code="out-of-range",
                )

    def rule(self, algorithm: Algorithm, smoothness: float, convexity: float) -> RoundRule:
        """The rule of ``algorithm``. Raises ConfigError for settings that contradict each other."""
        n = self.num_clients
        cohort = max(min(2, n), n // 10) if self.cohort is None else self.cohort
        cohort = cohort if algorithm in ("fedavg", "tamuna") else n
        sparsity = min(self.sparsity, n)
        sparsity = sparsity if algorithm in ("compressed-scaffnew", "tamuna") else cohort
        found = RoundRule.of_smoothness(
            smoothness, convexity, num_clients=n, sparsity=sparsity, cohort=cohort, seed=self.seed
        )
        if algorithm == "gd":
            return AveragingRule(n, found.lr, 1.0, n, n, self.seed)
        p = found.p if self.p is None else self.p
        if algorithm == "fedavg":
            p = math.sqrt(convexity / smoothness) if self.p is None else self.p
            return AveragingRule(n, found.lr, p, cohort, cohort, self.seed)
        return RoundRule(n, found.lr, p, sparsity, cohort, self.seed)


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """Where an algorithm stands: numbers sent and received by a client in the mean, so far."""

    rounds: int
    local_steps: int
    sent: float
    received: float
    squared_distance: float


@dataclass(frozen=True, slots=True)
class Trajectory:
    """An algorithm from the start to where it stopped. rule: its settings, as they were used."""

    algorithm: Algorithm
    rule: RoundRule
    target: float
    down_weight: float
    ends: list[RoundEnd] = field(default_factory=list)

    @property
    def has_arrived(self) -> bool:
        return self.ends[-1].squared_distance <= self.target

    def cost(self, end: RoundEnd) -> float:
        """Numbers sent, and with their weight numbers received."""
        return end.sent + self.down_weight * end.received

    def as_plain(self) -> dict[str, Any]:
        """For JSON; of many rounds only some, with the last."""
        every = max(1, len(self.ends) // 500)
        shown = [*self.ends[:-1:every], self.ends[-1]]
        return {
            "algorithm": self.algorithm,
            **{name: getattr(self.rule, name) for name in ("lr", "p", "sparsity", "cohort", "eta")},
            "arrived": self.has_arrived,
            "cost": self.cost(self.ends[-1]),
            "rounds": [asdict(end) for end in shown],
        }


def run_algorithm(
    algorithm: Algorithm,
    settings: FederationSettings,
    *,
    start: Tensor,
    optimum: Tensor,
    smoothness: tuple[float, float],
    slopes_of: Callable[[Sequence[int]], Slopes],
    world: World,
) -> Trajectory:
    """Rounds from ``start`` until the target, or the limit if it is in reach (collective).

    smoothness: L and mu of the clients' functions. slopes_of: as in ``ClientRounds``.
    """
    rule = settings.rule(algorithm, *smoothness)
    trajectory = Trajectory(algorithm, rule, settings.target, settings.down_weight)
    clients = ClientRounds(start, rule, world=world)
    distances: list[float] = []
    while clients.num_rounds < settings.max_rounds:
        clients.run_together(slopes_of)
        distance = float((clients.shared - optimum).square().sum())
        trajectory.ends.append(
            RoundEnd(
                clients.num_rounds,
                clients.num_steps,
                clients.num_sent,
                clients.num_received,
                distance,
            )
        )
        distances.append(distance)
        if trajectory.has_arrived or _is_hopeless(distances, settings):
            break
    clients.close()
    return trajectory


def _is_hopeless(distances: Sequence[float], settings: FederationSettings) -> bool:
    """Whether the target is out of reach, even if rounds to come gain several times as much as
    those so far; distances: squared, after each round.

    Medians, since masks and cohorts scatter distances, at first far beyond that of the start.
    """
    if len(distances) < _LEAST_ROUNDS or len(distances) % _CHECKED_EVERY:
        return False
    quarter = len(distances) // 4
    before = math.log(median(distances[quarter : 2 * quarter]))
    now = math.log(median(distances[-quarter:]))
    rounds_left = settings.max_rounds - len(distances)
    gain = _MOST_SPEED_UP * (before - now) / (2 * quarter) * rounds_left
    return not gain >= now - math.log(settings.target)  # infinite distances are hopeless
