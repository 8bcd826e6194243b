"""Waits: what each rank waits for, and the report of what all ranks do.

Ranks that do the same share a line of the report.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dearmpi.comm.messages.ranks import name_ranks


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank says of itself.

    backprops, steps, exchanges: how many backprops with communication, how many steps, and how
        many collective calls on the world, its main thread has begun.
    waiting: for what, or empty. in_exchange: it waits inside a collective call on the world.
    left: its program has come to its end. in_iteration: it has begun a backprop, and no step since.
    """

    backprops: int
    steps: int
    exchanges: int
    waiting: str
    waited_s: float
    in_exchange: bool
    left: bool
    stack: tuple[str, ...]
    in_iteration: bool = False

    def describe(self, *, waited: str | None = None) -> str:
        """One line, without the stack. ``waited``: how long, in other words."""
        if self.left:
            where = ", between a backward and its step" if self.in_iteration else ""
            return f"has ended after {self.backprops} backprops{where}"
        if not self.waiting:
            return f"has begun {self.backprops} backprops, does not wait for communication"
        if waited is None:
            waited = f"{self.waited_s:.0f} s"
        return f"has begun {self.backprops} backprops, waits {waited} for {self.waiting}"

    def waits_for(self, other: Status) -> bool:
        """Whether this wait certainly cannot end before ``other`` does something more.

        Of ranks that run one program the counts of one are never both above and below another's.
        """
        if not self.waiting:
            return False
        if self.in_exchange:
            return other.exchanges < self.exchanges
        return (other.backprops, other.steps) < (self.backprops, self.steps)


@dataclass(slots=True, eq=False)
class Wait:
    """What was asked and answered for it.

    thread: who waits. what: for what. in_exchange: inside a collective call on the world.
    interrupted: for what the thread waited already, where a signal handler or a finalizer of its
        own waits in the middle.
    since, looked_at: when it began, and when its thread last looked whether to go on.
    first_question: the number of the first question that can be asked for it.
    asked_at: when one last was. answered_at: when each rank has last answered any question.
    left_at: when each rank that has left first said so.
    spared_at, spared_by: when another rank, which asks for all, last did, and which.
    """

    thread: int
    what: str
    in_exchange: bool
    since: float
    looked_at: float
    first_question: int
    asked_at: float | None = None
    answers: dict[int, Status] = field(default_factory=dict)
    answered_at: dict[int, float] = field(default_factory=dict)
    is_reported: bool = False
    spared_at: float = float("-inf")
    spared_by: int = 0
    interrupted: str = ""
    left_at: dict[int, float] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        """What it waits for, and in the middle of what."""
        if not self.interrupted:
            return self.what
        return f"{self.what} (in a handler that interrupted the wait for {self.interrupted})"

    def skip(self, seconds: float, now: float) -> None:
        """This process did not run for so long until ``now``, and so can say nothing of others."""
        self.since += seconds
        # The progress thread may have gone on first, and asked and heard since.
        self.spared_at = min(now, self.spared_at + seconds)
        if self.asked_at is not None:
            self.asked_at = min(now, self.asked_at + seconds)
        for rank in list(self.answered_at):  # in place: it may add some meanwhile
            self.answered_at[rank] = min(now, self.answered_at[rank] + seconds)

    def hear(self, rank: int, status: Status, *, question: int, now: float) -> None:
        """``rank`` has answered ``question``, perhaps one of an earlier wait: it is not silent, but
        what it said need no longer hold.
        """
        self.answered_at[rank] = now
        if question >= self.first_question:
            self.answers[rank] = status
            if status.left:
                self.left_at.setdefault(rank, now)


@dataclass(frozen=True, slots=True)
class StallReport:
    """What a rank knows of all.

    hosts: every rank's. statuses: what ranks have said, by rank.
    silence: what there is to say of the others. silent_s: for how long ranks that have said
        something have been silent since, where they should not have been.
    """

    hosts: Sequence[str]
    statuses: Mapping[int, Status]
    silence: str
    silent_s: Mapping[int, float] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """A line for all ranks that do the same at the same place, then that place."""
        alike: dict[tuple[str, tuple[str, ...], bool], list[int]] = defaultdict(list)
        for rank in range(len(self.hosts)):
            status = self.statuses.get(rank)
            says = status.describe(waited="") if status else ""
            alike[says, status.stack if status else (), rank in self.silent_s].append(rank)
        lines: list[str] = []
        for (_, stack, _), ranks in alike.items():
            lines.append(f"  {self._name(ranks)}{self._describe(ranks)}")
            lines += [f"      {line}" for line in stack]
        return lines

    def _name(self, ranks: Sequence[int]) -> str:
        if len(ranks) == 1:
            return f"rank {ranks[0]} on {self.hosts[ranks[0]]}: "
        return f"{name_ranks(ranks, self.hosts)}: each "

    def _describe(self, ranks: Sequence[int]) -> str:
        """What ``ranks`` do, which all do the same, perhaps for different times."""
        status = self.statuses.get(ranks[0])
        if status is None:
            return self.silence
        says = status.describe(waited=_span(self.statuses[rank].waited_s for rank in ranks))
        if ranks[0] not in self.silent_s:
            return says
        return f"{self.silence}; {_span(self.silent_s[rank] for rank in ranks)} ago it {says}"


def _span(seconds: Iterable[float]) -> str:
    """Such as ``29-31 s``."""
    ordered = sorted(seconds)
    low, high = f"{ordered[0]:.0f}", f"{ordered[-1]:.0f}"
    return f"{low} s" if low == high else f"{low}-{high} s"
