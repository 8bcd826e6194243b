"""Late buckets: those that backprop does not fill by itself go last, to hold up no others."""

from __future__ import annotations

from collections import deque

from dearmpi.engine.iteration.cycle import Cycle

# For so many steps a bucket that was not filled goes last: needlessly late it is late alone, but
# where it ought to be late and is not, it holds up all that stand behind it.
_STEPS_LATE = 8


class LateBuckets:
    """From the last steps but one, of whose buckets all ranks have told each other."""

    def __init__(self) -> None:
        self._called: deque[Cycle] = deque(maxlen=_STEPS_LATE + 1)

    def called(self, cycle: Cycle) -> None:
        """The roll call of ``cycle`` is under way, by which ``unfilled`` becomes all ranks'."""
        self._called.append(cycle)

    def are_known(self) -> bool:
        """Whether the ranks have told each other by what the next cycle's order is decided.

        Of the step before the last: to ask for the last one's might be to wait for other ranks.
        """
        return len(self._called) < 2 or self._called[-2].used is not None

    def find(self) -> frozenset[int]:
        """By their numbers, once they ``are_known``."""
        return frozenset[int]().union(*(one.unfilled for one in list(self._called)[:-1]))
