"""Chains of waits: a rank waits for a second one, which waits for a third, and none can go on.

Groups of ranks overlap, so three calls on three groups can wait for each other in turn, where no
two do. Such a circle may also lie behind the ranks that wait for one of its members.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dearmpi.comm.watchdog.waits import Status

_MOST_NAMED = 4  # ranks of a circle in an error, whose report has all


@dataclass(frozen=True, slots=True)
class WaitChain:
    """Ranks, each of which waits for the next one.

    The last one has ended, or waits for ``ranks[circle_at]``; None: it has ended.
    """

    ranks: tuple[int, ...]
    circle_at: int | None = None

    def explain(self, statuses: Mapping[int, Status]) -> str:
        """Why the first rank waits in vain, and what to do."""
        if self.circle_at is None:
            between = ", which waits for ".join(f"rank {rank}" for rank in self.ranks[1:])
            ended = statuses[self.ranks[-1]]
            why = f"it waits for {between}, which {ended.describe()}"
            if ended.exit_status:
                return f"{why}: all of them wait in vain, and the job ends with this status"
            return f"{why}. Have all ranks make the same calls on the groups that they share"
        circle = self.ranks[self.circle_at :]
        named = [f"rank {rank} {statuses[rank].describe_place()}" for rank in circle[:_MOST_NAMED]]
        if len(circle) > _MOST_NAMED:
            named.append(f"and {len(circle) - _MOST_NAMED} more")
        behind = f"it waits for rank {circle[0]}, and " if self.circle_at else ""
        return (
            f"{behind}{len(circle)} ranks wait for each other in turn: {'; '.join(named)}. Call "
            "operations on all groups in one order on every rank, such as first on all rows of a "
            "grid and then on all columns"
        )


def find_chain(first: int, statuses: Mapping[int, Status]) -> WaitChain | None:
    """What keeps ``first`` waiting for ever, by the statuses of all ranks; None if nothing does.

    Statuses of different moments will do. Counts of calls only grow, and a rank that waits goes on
    when another has begun more. So a circle that they show was there at the latest of the moments.
    """
    path, is_tried = [first], {first}
    trails: list[Iterator[int]] = [_waited_for(first, statuses)]
    while path:
        following = next(trails[-1], None)
        if following is None:
            path.pop()
            trails.pop()
        elif following in path:
            return WaitChain(tuple(path), path.index(following))
        elif statuses[following].left:
            return WaitChain((*path, following))
        elif following not in is_tried:
            is_tried.add(following)
            path.append(following)
            trails.append(_waited_for(following, statuses))
    return None


def _waited_for(rank: int, statuses: Mapping[int, Status]) -> Iterator[int]:
    own = statuses[rank]
    return (other for other in sorted(statuses) if own.waits_for(statuses[other]))
