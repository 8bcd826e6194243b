"""Roster: what each rank of one pytest run is doing, in a folder that all of them can read.

Files rather than messages, because what a test leaves behind in MPI is unknown once it has failed,
and because a rank that hangs inside MPI can still be looked at from outside.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import shutil
import signal
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

FOLDER_VARIABLE = "DEARMPI_TEST_ROSTER"
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_UNTOLD = ("/_pytest/", "/pytest/", "/pluggy/", "<frozen ")  # frames that tell nothing
_STACK_SIGNAL = signal.SIGUSR2  # MPICH keeps SIGUSR1 for itself


@dataclass(frozen=True, slots=True)
class Entry:
    """One rank.

    collected: stands for the tests that all ranks run together, in their order.
    outcomes: one letter for each of those that ended here: ``P`` passed or skipped, ``F`` failed.
    running, since_s: the test under way and when it began (monotonic clock); None between tests.
    slow: whether that test is allowed to take long.
    left: whether this rank is through.
    """

    rank: int
    size: int
    pid: int
    collected: int = 0
    outcomes: str = ""
    running: str | None = None
    since_s: float = 0.0
    slow: bool = False
    left: bool = False

    def is_gone(self) -> bool:
        """Whether its process has ended before it was through; a launcher that waits for its
        children's output need not have taken note of that.
        """
        if self.left:
            return False
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in "ZX"


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process, or the one with this environment, is a rank of an MPI job."""
    return any(name in environment for name in _RANK_VARIABLES)


def launched_rank(environment: Mapping[str, str] = os.environ) -> int:
    """This process's rank as the launcher announced it; 0 without a launcher."""
    return _announced(environment, _RANK_VARIABLES, 0)


def launched_size(environment: Mapping[str, str] = os.environ) -> int:
    """The number of ranks that the launcher announced; 1 without a launcher."""
    return _announced(environment, _SIZE_VARIABLES, 1)


def _announced(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    return next((int(environment[name]) for name in names if name in environment), default)


def roster_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the ranks of this job meet: named by ``tests/launch.py``, else by their parent."""
    if FOLDER_VARIABLE in environment:
        return Path(environment[FOLDER_VARIABLE])
    parent = os.getppid()
    try:  # a process number returns, together with its start time it does not
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "0"
    return Path(tempfile.gettempdir()) / f"dearmpi-roster-{os.getuid()}-{parent}-{started}"


def read_entry(folder: Path, rank: int) -> Entry | None:
    """What ``rank`` wrote last; None before it began."""
    try:
        return Entry(**json.loads(_entry_path(folder, rank).read_text()))
    except FileNotFoundError:
        return None


def collect_stacks(folder: Path, ranks: list[int], *, wait_s: float = 15.0) -> str:
    """The Python stacks of ``ranks``, asked of them by signal; for people to read."""
    sections = []
    for rank in ranks:
        entry = read_entry(folder, rank)
        if entry is None or entry.left:
            sections.append(f"--- rank {rank}: {'through' if entry else 'not started'}")
            continue
        where = f"in {entry.running}" if entry.running else "between tests"
        stacks = _ask_for_stacks(folder, entry, wait_s)
        sections.append(f"--- rank {rank} (process {entry.pid}) {where}\n{stacks}")
    return "\n".join(sections)


def _ask_for_stacks(folder: Path, entry: Entry, wait_s: float) -> str:
    path = _stack_path(folder, entry.rank)
    try:
        os.kill(entry.pid, _STACK_SIGNAL)
    except ProcessLookupError:
        return "the process is gone"
    deadline = time.monotonic() + wait_s
    size = -1
    while time.monotonic() < deadline:  # until something is there and no more comes
        time.sleep(0.1)
        grown = path.stat().st_size
        if grown and grown == size:
            break
        size = grown
    lines = path.read_text().splitlines()
    frames = [line for line in lines if line and not any(part in line for part in _UNTOLD)]
    return "\n".join(frames) or f"no answer within {wait_s:g} s"


def _entry_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def _stack_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.stacks"


class Roster:
    """This rank's own entry, and its view of the others'."""

    def __init__(self, folder: Path, *, rank: int, size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._entry = Entry(rank=rank, size=size, pid=os.getpid())
        self._stacks: TextIO = _stack_path(folder, rank).open("w")
        faulthandler.register(_STACK_SIGNAL, file=self._stacks, all_threads=True)
        self._write(self._entry)

    def collected(self, tests: list[str]) -> None:
        """Note which tests all ranks are to run together, to be compared over ranks."""
        self._write(replace(self._entry, collected=zlib.crc32("\n".join(tests).encode())))

    def started(self, test: str, *, slow: bool) -> None:
        """Note that ``test`` begins here."""
        self._write(replace(self._entry, running=test, since_s=time.monotonic(), slow=slow))

    def ended(self) -> None:
        """Note that no test is under way here."""
        self._write(replace(self._entry, running=None))

    def agree(self, *, failed: bool, patience_s: float | None) -> Agreement:
        """Say how the test under way ended here, and wait for the other ranks to say so too.

        patience_s: how long to wait for them; None waits until something outside ends the job.
        """
        number = len(self._entry.outcomes)
        outcomes = self._entry.outcomes + ("F" if failed else "P")
        self._write(replace(self._entry, outcomes=outcomes))
        deadline = math.inf if patience_s is None else time.monotonic() + patience_s
        for pause_s in _growing_pauses():
            entries = [read_entry(self.folder, rank) for rank in range(self._entry.size)]
            waiting = [e for e in entries if e is None or len(e.outcomes) <= number]
            # From a rank that has left, nothing comes any more.
            left = any(entry is not None and entry.left for entry in waiting)
            if not waiting or left or time.monotonic() > deadline:
                break
            time.sleep(pause_s)
        here = [entry for entry in entries if entry is not None]
        return Agreement(
            failed=[e.rank for e in here if e.outcomes[number : number + 1] == "F"],
            missing=[rank for rank, entry in enumerate(entries) if entry in waiting],
            differing=[e.rank for e in here if e.collected != self._entry.collected],
        )

    def wait_for_root(self) -> None:
        """If tests were run together, wait until rank 0 is through, without burning its cores."""
        if not self._entry.outcomes:
            return
        for pause_s in _growing_pauses():
            root = read_entry(self.folder, 0)
            if root is None or root.left or not _is_alive(root.pid):
                return
            time.sleep(pause_s)

    def kill_others(self) -> None:
        """Kill the other ranks, for when MPI is not there to do it."""
        for rank in range(self._entry.size):
            entry = read_entry(self.folder, rank)
            if entry is not None and entry.pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(entry.pid, signal.SIGKILL)

    def leave(self) -> None:
        """Take this rank off the roster; the last one removes it."""
        faulthandler.unregister(_STACK_SIGNAL)
        self._stacks.close()
        self._write(replace(self._entry, left=True))
        entries = [read_entry(self.folder, rank) for rank in range(self._entry.size)]
        if all(entry is not None and entry.left for entry in entries):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, entry: Entry) -> None:
        path = _entry_path(self.folder, entry.rank)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(entry)))
        new.replace(path)  # readers see the old entry or the new one, never half of one
        self._entry = entry


@dataclass(frozen=True, slots=True)
class Agreement:
    """How one test ended, by rank: where it failed, where it has not ended, who ran another."""

    failed: list[int]
    missing: list[int]
    differing: list[int]


def _growing_pauses() -> Iterator[float]:
    """Seconds to sleep between looks: short at first, as most waits are."""
    pause_s = 0.001
    while True:
        yield pause_s
        pause_s = min(pause_s * 1.5, 0.05)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
