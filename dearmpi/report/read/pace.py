"""Stragglers: ranks for which the others wait, by one rule for the console and the report."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

# A part of less than this share of a step is not worth anybody's time.
WORTH = 0.10
_WAITED_SHARE = 0.5  # of the excess: where the others do not wait for it, it costs nothing
_ALIKE_SHARE = 1 / 3  # of the excess: ranks so near to the slowest are as slow
STRETCH_STEPS = 10  # over fewer steps any rank may be late: noise averages out
STEADY = 5  # stretches in a row: ranks that share cores are late in turn, and each for a while
_MOST_NUMBERS = 8  # of ranks or hosts in a sentence


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Ranks for which the others wait, by their places; those of a slow host are slow together.

    busy, wait: seconds per step of each of them. typical_s, typical_wait_s: those of the others'
    median rank.
    """

    busy: Mapping[int, float]
    wait: Mapping[int, float]
    typical_s: float
    typical_wait_s: float

    @property
    def places(self) -> tuple[int, ...]:
        return tuple(self.busy)

    @property
    def busy_s(self) -> float:
        """What the median of them is busy per step."""
        return median(self.busy.values())

    @property
    def waited_s(self) -> float:
        """What the others wait longer than they do, by median."""
        return self.typical_wait_s - median(self.wait.values())

    @property
    def excess_s(self) -> float:
        """What a step would gain at most without them."""
        return self.busy_s - self.typical_s

    def only(self, places: Iterable[int]) -> Stragglers | None:
        """Those at ``places``; None if none of them is."""
        wanted = set(places)
        left = [place for place in self.places if place in wanted]
        if not left:
            return None
        busy, wait = ({place: of[place] for place in left} for of in (self.busy, self.wait))
        return replace(self, busy=busy, wait=wait)


def find_stragglers(
    busy_s: Sequence[float], wait_s: Sequence[float], *, step_s: float
) -> Stragglers | None:
    """The ranks that are busy longest, if that costs ``WORTH`` of a step and the others wait.

    They are at most half of the ranks: where more are as slow, it is the others that are fast.
    busy_s, wait_s: of each rank, in seconds per step.
    """
    if len(busy_s) < 2:
        return None
    usual_s = median(sorted(busy_s)[: len(busy_s) // 2])
    most_s = max(busy_s) - usual_s  # no excess is greater: the others include the faster half
    if step_s <= 0 or most_s < WORTH * step_s:
        return None
    least_s = max(busy_s) - _ALIKE_SHARE * most_s
    slow = {rank: own_s for rank, own_s in enumerate(busy_s) if own_s >= least_s}
    others = [rank for rank in range(len(busy_s)) if rank not in slow]
    if len(slow) > len(others):
        return None
    found = Stragglers(
        slow,
        {rank: wait_s[rank] for rank in slow},
        median(busy_s[rank] for rank in others),
        median(wait_s[rank] for rank in others),
    )
    matters = found.excess_s >= WORTH * step_s
    return found if matters and found.waited_s >= _WAITED_SHARE * found.excess_s else None


def name_ranks(hosts: Mapping[int, str]) -> str:
    """``rank 3 on n1``, ``ranks 2 and 5 on n1``, ``ranks 8 to 15 on n1, n2``.

    hosts: of each rank; empty where not known.
    """
    ranks, places = sorted(hosts), sorted({host for host in hosts.values() if host})
    first, last = ranks[0], ranks[-1]
    if first == last:
        named = f"rank {first}"
    elif len(ranks) > 2 and last - first < len(ranks):
        named = f"ranks {first} to {last}"
    elif len(ranks) <= _MOST_NUMBERS:
        named = f"ranks {', '.join(map(str, ranks[:-1]))} and {last}"
    else:
        named = f"{len(ranks)} ranks, {first} to {last},"
    if len(places) > _MOST_NUMBERS:
        return f"{named} on {len(places)} hosts"
    return f"{named} on {', '.join(places)}" if places else named


@dataclass(slots=True)
class SlowRanks:
    """Which ranks were slow in each stretch of a run, from the times of all ranks.

    A stretch is as many rows of metrics as make up ``STRETCH_STEPS``. Of those before the last
    ``STEADY`` only counts are kept, since a run may go on for weeks.
    """

    last_step: int
    _num_steps: int = 0
    _busy_s: list[float] = field(default_factory=list)
    _wait_s: list[float] = field(default_factory=list)
    _num_stretches: int = 0
    _num_slow: Counter[int] = field(default_factory=Counter)  # stretches, by a slow rank's place
    _last_places: deque[frozenset[int]] = field(default_factory=lambda: deque(maxlen=STEADY))
    _latest: Stragglers | None = None

    def add(self, step: int, busy_s: Sequence[float], wait_s: Sequence[float]) -> None:
        """Count the steps up to ``step``; the seconds are each rank's means per step."""
        count, self.last_step = step - self.last_step, step
        if self._num_steps == 0:
            self._busy_s, self._wait_s = [0.0] * len(busy_s), [0.0] * len(wait_s)
        self._num_steps += count
        for sums, means in ((self._busy_s, busy_s), (self._wait_s, wait_s)):
            sums[:] = [total + count * mean for total, mean in zip(sums, means, strict=True)]
        if self._num_steps >= STRETCH_STEPS:
            self._end_stretch()

    def _end_stretch(self) -> None:
        busy_s, wait_s = (
            [total / self._num_steps for total in sums] for sums in (self._busy_s, self._wait_s)
        )
        step_s = max(map(sum, zip(busy_s, wait_s, strict=True)), default=0.0)
        self._latest = find_stragglers(busy_s, wait_s, step_s=step_s)
        places = () if self._latest is None else self._latest.places
        self._num_stretches += 1
        self._num_slow.update(places)
        self._last_places.append(frozenset(places))
        self._num_steps = 0

    @property
    def steady(self) -> Stragglers | None:
        """In the latest stretch, the ranks that were slow in each of the last ``STEADY``."""
        if len(self._last_places) < STEADY or self._latest is None:
            return None
        return self._latest.only(frozenset.intersection(*self._last_places))

    def has_recovered(self, place: int) -> bool:
        """Whether the rank at ``place`` was slow in none of the last ``STEADY`` stretches."""
        return not any(place in places for places in self._last_places)

    def share(self, place: int) -> float:
        """The share of stretches in which the rank at ``place`` was slow; 1 where there is none."""
        if not self._num_stretches:
            return 1.0
        return self._num_slow[place] / self._num_stretches


@dataclass(slots=True)
class StragglerWatch:
    """Names ranks that hold the others up all the time, once until they no longer do.

    hosts: of each rank.
    """

    slow_ranks: SlowRanks
    hosts: Sequence[str]
    _named: frozenset[int] = frozenset()

    def add(self, step: int, busy_s: Sequence[float], wait_s: Sequence[float]) -> str:
        """Count the steps up to ``step``; returns a line on ranks not named yet, or nothing."""
        self.slow_ranks.add(step, busy_s, wait_s)
        steady, line = self.slow_ranks.steady, ""
        if steady is not None and not self._named.issuperset(steady.places):
            line = describe_stragglers(steady, self.hosts)
            self._named = self._named.union(steady.places)
        recovered = {place for place in self._named if self.slow_ranks.has_recovered(place)}
        self._named = self._named.difference(recovered)
        return line


def describe_stragglers(slow: Stragglers, hosts: Sequence[str]) -> str:
    """Which ranks are slow, by how much, and what it costs the others."""
    named = name_ranks({rank: hosts[rank] for rank in slow.places})
    be, it = ("is", "it") if len(slow.places) == 1 else ("are", "them")
    return (
        f"{named} {be} slow: busy for {slow.busy_s:.3g} s per step, the other ranks for "
        f"{slow.typical_s:.3g} s, and they wait {slow.waited_s:.3g} s for {it}; see what else runs "
        "there, the cores and the data"
    )


@dataclass(slots=True)
class Pace:
    """Adds up the time between steps, such as for checkpoints and evaluations.

    What came before the first row pays for starting, and is left out.
    """

    _last: tuple[int, float] | None = None
    _num_steps: int = 0
    _between_s: float = 0.0

    def add(self, step: int, elapsed_s: float | None, step_s: float | None) -> None:
        """Count a row of metrics: the seconds since the process began to train, and per step."""
        if elapsed_s is None or step_s is None:
            return
        last, self._last = self._last, (step, elapsed_s)
        if last is None or elapsed_s <= last[1]:  # a resumed run, whose clock began anew
            return
        num_steps = step - last[0]
        self._num_steps += num_steps
        self._between_s += max(0.0, elapsed_s - last[1] - num_steps * step_s)

    @property
    def between_s(self) -> float:
        """Seconds between two steps, by mean: most take none, and a checkpoint takes many."""
        return self._between_s / max(1, self._num_steps)
