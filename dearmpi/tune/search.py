"""Search: which bucket caps to try, one after the other, to find the fastest."""

from __future__ import annotations

import csv
import math
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dearmpi.comm.world import World
from dearmpi.config import MIB
from dearmpi.errors import ConfigError, DearError, UsageError


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The bucket caps that may be tried; by default those of the paper."""

    lowest_bytes: int = 1 * MIB
    highest_bytes: int = 256 * MIB
    start_bytes: int = 25 * MIB

    def __post_init__(self) -> None:
        if not 0 < self.lowest_bytes <= self.start_bytes <= self.highest_bytes:
            raise ConfigError(
                f"a search from {self.lowest_bytes} to {self.highest_bytes} bytes cannot start at "
                f"{self.start_bytes}; the start must lie between, and all must be above 0",
                code="out-of-range",
            )

    def cap_bytes(self, share: float) -> int:
        """The cap at ``share`` of the way, 0 to 1, from lowest to highest.

        Equal ways are equal ratios: from 1 to 2 MiB changes as much as from 100 to 200.
        """
        ratio = self.highest_bytes / self.lowest_bytes
        return round(self.lowest_bytes * math.pow(ratio, share))


@dataclass(frozen=True, slots=True)
class Trial:
    """An iteration took ``seconds`` with buckets of about ``cap_bytes``."""

    cap_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ConfigError(
                f"an iteration with buckets of {self.cap_bytes} bytes took {self.seconds} s; the "
                "time must be a number above 0",
                code="measurement-flawed",
            )


class Search(ABC):
    """Suggests caps and is told how long iterations took with them.

    The same observations give the same suggestions, on every rank and in every run.
    """

    def __init__(self, space: SearchSpace | None = None, *, num_trials: int) -> None:
        if num_trials < 1:
            raise ConfigError(
                f"a search of {num_trials} trials finds nothing; give 1 at least",
                code="out-of-range",
            )
        self.space = space or SearchSpace()
        self.num_trials = num_trials
        self._trials: list[Trial] = []

    @property
    def trials(self) -> Sequence[Trial]:
        """What was observed, in order."""
        return tuple(self._trials)

    @property
    def is_done(self) -> bool:
        """Whether all trials have been observed."""
        return len(self._trials) >= self.num_trials

    @property
    def best(self) -> Trial:
        """The fastest trial; the earliest of several. Raises UsageError before the first."""
        if not self._trials:
            raise UsageError(
                "nothing was observed yet: no cap is the best", code="measurement-too-short"
            )
        return min(self._trials, key=lambda trial: trial.seconds)

    def suggest(self) -> int:
        """The cap to try next, in bytes; the best once the search is done."""
        return self.best.cap_bytes if self.is_done else self._next_cap()

    def observe(self, cap_bytes: int, seconds: float) -> None:
        """An iteration took ``seconds`` with ``cap_bytes``. Raises ConfigError for no time."""
        self._trials.append(Trial(cap_bytes, seconds))

    @abstractmethod
    def _next_cap(self) -> int: ...


class GridSearch(Search):
    """Caps in equal ratios from the lowest to the highest, the smallest first."""

    def _next_cap(self) -> int:
        return self.space.cap_bytes(len(self._trials) / max(1, self.num_trials - 1))


class RandomSearch(Search):
    """Caps drawn at random, every ratio as likely as any other; the same for the same seed."""

    def __init__(self, space: SearchSpace | None = None, *, num_trials: int, seed: int = 0) -> None:
        super().__init__(space, num_trials=num_trials)
        self._seed = seed

    def _next_cap(self) -> int:
        draw = random.Random(f"{self._seed} {len(self._trials)}")
        return self.space.cap_bytes(draw.random())


def write_trials(path: Path, search: Search) -> None:
    """Write all trials as CSV, the best row marked ``*``; replaces the file in one piece.

    Raises DearError if it cannot be written.
    """
    rows = [
        (number, f"{trial.cap_bytes / MIB:.4f}", f"{trial.seconds:.6f}", trial is search.best)
        for number, trial in enumerate(search.trials, start=1)
    ]
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("trial", "bucket_cap_mb", "iteration_s", "best"))
            writer.writerows((*row[:3], "*" if row[3] else "") for row in rows)
        os.replace(partial, path)
    except OSError as error:
        raise DearError(
            f"cannot write the search's log {path}: {error}", code="cannot-write"
        ) from error


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
