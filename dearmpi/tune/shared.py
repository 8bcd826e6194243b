"""Shared search: one search for all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dearmpi.comm.world import World
from dearmpi.tune.search import Search, Trial, write_trials


class SharedSearch:
    """``search`` on all ranks of ``world``: rank 0 suggests, and the slowest rank's time counts.

    log: a CSV file that rank 0 writes anew after every trial.
    """

    def __init__(self, world: World, search: Search, *, log: Path | None = None) -> None:
        self._world = world
        self._search = search
        self._log = log

    @property
    def is_done(self) -> bool:
        """Whether all trials have been observed."""
        return self._search.is_done

    @property
    def best(self) -> Trial:
        """The fastest trial. Raises UsageError before the first."""
        return self._search.best

    @property
    def trials(self) -> Sequence[Trial]:
        """What was observed, in order."""
        return self._search.trials

    def suggest(self) -> int:
        """The cap to try next, in bytes, as rank 0 chooses it (collective).

        Ranks with other processors may round otherwise, so that each by itself could choose
        another cap.
        """
        own = str(self._search.suggest()) if self._world.is_root else ""
        return int(self._world.broadcast_text(own))

    def observe(self, cap_bytes: int, seconds: float) -> None:
        """An iteration with ``cap_bytes`` took ``seconds`` on this rank (collective)."""
        slowest = self._world.all_reduce([seconds], "max")[0]
        self._search.observe(cap_bytes, slowest)
        if self._log is not None and self._world.is_root:
            write_trials(self._log, self._search)
