"""Local schedule: at which steps the fragments of a model start to travel, and are merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

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
