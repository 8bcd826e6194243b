"""Local schedule: at which steps the fragments of a model start to travel, and are merged; and the
rounds of Scaffnew, CompressedScaffnew and TAMUNA: who takes part, for how long, sending what.

All of a round follows from a seed, so that every rank knows it of all clients without a message.
Source: TAMUNA, arXiv 2302.09832; CompressedScaffnew (``cohort`` is all) 2210.13277; Scaffnew
(``sparsity`` is all, too) 2202.09357; FedAvg, without control variates, 1602.05629.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from random import Random

from dearmpi.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LocalSchedule:
    """When ranks that train by themselves exchange what they have learned.

    sync_every: steps from one exchange of a fragment to its next one.
    fragments: parts of the model, whose exchanges are spread evenly over those steps.
    delay: steps from the start of an exchange until its result is merged.

    A step number is the number of steps that are over; it is the same on all ranks. Since ``delay``
    is below ``sync_every / fragments``, no two exchanges are under way at once.

    Raises ConfigError for numbers that contradict this.
    """

    sync_every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        for name, least in (("sync_every", 1), ("fragments", 1), ("delay", 0)):
            check_count(name, getattr(self, name), least)
        if self.fragments > self.sync_every:
            raise ConfigError(
                f"fragments is {self.fragments}, but sync_every is {self.sync_every}; a step starts"
                " at most one exchange: give fewer fragments or a larger sync_every",
                code="settings-contradict",
            )
        if self.delay * self.fragments >= self.sync_every:
            raise ConfigError(
                f"delay is {self.delay}, but sync_every / fragments is {self.sync_every} / "
                f"{self.fragments}, and one exchange must end before the next one starts; give a "
                "smaller delay",
                code="settings-contradict",
            )

    @staticmethod
    def most_delay(sync_every: int, fragments: int) -> int:
        """The largest delay that the two allow."""
        return (sync_every - 1) // fragments

    def offset(self, fragment: int) -> int:
        """The first step, from 0 on, at which ``fragment`` may start: evenly spread."""
        return (2 * fragment * self.sync_every + self.fragments) // (2 * self.fragments)

    def starting(self, step: int) -> int | None:
        """The fragment whose exchange starts after ``step`` steps; None if none does."""
        if step < 1:
            return None
        within = step % self.sync_every
        found = (one for one in range(self.fragments) if self.offset(one) == within)
        return next(found, None)


@dataclass(frozen=True, slots=True)
class OuterRule:
    """How shared values move: SGD's ``lr`` and ``momentum``, Nesterov's; ``mix``: the part of its
    own values that a rank keeps at a merge.
    """

    lr: float
    momentum: float
    mix: float

    def progress(self, schedule: LocalSchedule, fragment: int, num_steps: int) -> float:
        """How far the shared values of ``fragment`` come in ``num_steps``, where ranks move by one
        in each on average.
        """
        own = shared = velocity = 0.0
        due = -1
        for step in range(1, num_steps + 1):
            own += 1.0
            if step == due:
                own = self.mix * own + (1 - self.mix) * shared
            if schedule.starting(step) == fragment:
                delta = own - shared
                velocity = self.momentum * velocity + delta
                shared += self.lr * (delta + self.momentum * velocity)
                due = step + schedule.delay
                if not schedule.delay:
                    own = shared
        return shared


def check_count(name: str, value: object, least: int) -> None:
    """Raise ConfigError unless ``value`` is a whole number of at least ``least``."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ConfigError(
            f"{name} is {value!r}, of type {type(value).__name__}; give a whole number",
            code="wrong-type",
        )
    if value < least:
        raise ConfigError(f"{name} is {value}; it must be at least {least}", code="out-of-range")


def check_real(name: str, value: object) -> None:
    """Raise ConfigError unless ``value`` is a number, or converts to one as tensors do."""
    if isinstance(value, str | bool) or not hasattr(value, "__float__"):
        raise ConfigError(
            f"{name} is {value!r}, of type {type(value).__name__}; give a number",
            code="wrong-type",
        )


def deal_runs(sizes: Sequence[int], parts: int) -> tuple[range, ...]:
    """Cut a sequence into ``parts`` runs of about equal total size, none of them empty.

    sizes: of each element, such as bytes of buckets. Returns the indexes of each run.
    Raises ConfigError for more parts than elements.
    """
    if parts > len(sizes):
        raise ConfigError(
            f"fragments is {parts}, but the model has {len(sizes)} buckets, which are not cut; "
            f"give at most {len(sizes)} fragments, or smaller buckets by bucket_cap_mb",
            code="out-of-range",
        )
    runs, start, left = [], 0, sum(sizes)
    for remaining in range(parts, 0, -1):
        stop, size = start + 1, sizes[start]
        last = len(sizes) - remaining + 1
        while stop < last and (remaining == 1 or size + sizes[stop] / 2 <= left / remaining):
            size += sizes[stop]
            stop += 1
        runs.append(range(start, stop))
        start, left = stop, left - size
    return tuple(runs)


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
        for name, at_least in (("num_clients", 1), ("cohort", least), ("sparsity", least)):
            check_count(name, getattr(self, name), at_least)
        if not self.sparsity <= self.cohort <= self.num_clients:
            raise ConfigError(
                f"sparsity is {self.sparsity}, cohort {self.cohort}, and there are "
                f"{self.num_clients} clients; give sparsity <= cohort <= clients",
                code="out-of-range",
            )
        for name in ("p", "lr"):
            check_real(name, getattr(self, name))
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
        for name, value in (("smoothness", smoothness), ("convexity", convexity)):
            check_real(name, value)
        if not 0 < convexity <= smoothness < math.inf:
            raise ConfigError(
                f"smoothness is {smoothness} and convexity {convexity}; give 0 < convexity <= "
                "smoothness",
                code="out-of-range",
            )
        senders = max(sparsity, 1)  # fewer are refused below
        p = min(1.0, math.sqrt(num_clients * convexity / (senders * smoothness)))
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
