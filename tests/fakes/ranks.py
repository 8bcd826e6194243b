"""Ranks as threads of one process, for tests that need several ranks and no MPI."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

from dearmpi.comm.api.call import frames_of_threads
from dearmpi.comm.world import World
from dearmpi.config import ProgressMode
from dearmpi.errors import CommError
from tests.fakes import FakeCollectives, FakeHub

T = TypeVar("T")

# Reached only by what hangs: slow tests compute for tens of seconds, and machines have other work.
# Below pytest's own limit, so that this one's error comes first.
_PATIENCE_S = 240.0
_GRACE_S = 5.0  # for ranks to notice that another one has failed


def run_ranks(
    size: int,
    function: Callable[[World], T],
    *,
    hub: FakeHub | None = None,
    progress: ProgressMode = "thread",
    timeout_s: float = _PATIENCE_S,
) -> list[T]:
    """Call ``function(world)`` in one thread per rank; return the results by rank.

    The first error of any rank is raised here, with the tracebacks of all that failed as notes;
    it fails the pending operations of the others. Raises CommError with the stacks of all
    threads if a rank is still running after ``timeout_s`` seconds.
    """
    job = _Job(size, function, hub or FakeHub(size), progress)
    threads = [
        threading.Thread(target=job.run, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    if not _join(threads, timeout_s):
        stacks, failed = _stacks(), bool(job.errors)
        job.hub.fail(f"the ranks were given up after {timeout_s} s")
        _join(threads, _GRACE_S)
        if not failed:
            raise CommError(f"ranks still ran after {timeout_s} s:\n{stacks}")
    job.raise_first_error()
    return [job.results[rank] for rank in range(size)]


class _Job(Generic[T]):
    """The ranks' function, and what became of it on each."""

    def __init__(
        self, size: int, function: Callable[[World], T], hub: FakeHub, progress: ProgressMode
    ) -> None:
        assert hub.size == size, f"the hub joins {hub.size} ranks, not {size}"
        self.function, self.hub, self.progress = function, hub, progress
        self.results: dict[int, T] = {}
        self.errors: list[tuple[int, BaseException]] = []

    def run(self, rank: int) -> None:
        """Be rank ``rank`` from its connection to its end."""
        try:
            world = World(FakeCollectives(self.hub, rank), progress=self.progress)
            try:
                self.results[rank] = self.function(world)
            finally:
                world.close()
        except BaseException as error:  # also SystemExit, by which a rank aborts the job
            self.errors.append((rank, error))
            self.hub.fail(f"rank {rank} failed with {error!r}")

    def raise_first_error(self) -> None:
        """Raise what went wrong first, if anything did, with every rank's traceback.

        A rank that aborted the job comes before all others, which may have noticed sooner.
        """
        if not self.errors:
            return
        aborts = (error for _, error in self.errors if isinstance(error, SystemExit))
        first = next(aborts, self.errors[0][1])
        for rank, error in list(self.errors):
            trace = "".join(traceback.format_exception(error))
            first.add_note(f"[rank {rank}] {trace}")
        raise first


def _join(threads: list[threading.Thread], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _stacks() -> str:
    """The stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames_of_threads().items()
    )
