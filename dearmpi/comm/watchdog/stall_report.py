"""Stall report: what all ranks do while one of them waits; ranks that do the same are one line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dearmpi.comm.api.status import Status
from dearmpi.comm.messages.crowd import name_ranks


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
