"""Ending: how a process leaves its job, so that no rank waits for ever or vanishes quietly."""

from __future__ import annotations

import os
import sys
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from dearmpi.comm import last_words
from dearmpi.comm.deadline import Deadline
from dearmpi.comm.stack import origin_of
from dearmpi.comm.watchdog import StallLimits
from dearmpi.comm.workers import advise_on_workers
from dearmpi.errors import CommError, DearError

if TYPE_CHECKING:
    from dearmpi.comm.world import World

# A rank under which MPI has failed was perhaps left by another, which says why and ends the job:
# launchers may take 2 s to reach all hosts.
_GRACE_OF_VICTIMS_S = 3.0


def limit_end(world: World, limits: StallLimits) -> Deadline:
    """For MPI's finalisation, which no watchdog can look into."""
    return Deadline(
        limits,
        who=f"rank {world.rank} on {world.host}",
        what="the other ranks in MPI's finalisation",
        advice=(
            "every program had come to its end, but then a rank was stopped or a host cut off. "
            "What was saved is whole; look after the processes that are left on "
            f"{', '.join(dict.fromkeys(world.hosts))}"
        ),
    )


def leave(world: World, deadline: Deadline | None) -> None:
    """At the end of the program: a rank that is still waited for must not vanish quietly."""
    if world.is_closed:
        return  # nobody has waited for the others, which may have work left to do
    if _is_finalized():
        last_words.say(
            f"[rank {world.rank} on {world.host}] the program has called MPI.Finalize() while MPI "
            "was still in use, which MPI may punish by ending the process; leave it out, since MPI "
            "ends by itself, or call world.leave() on every rank before"
        )
        _close_without_mpi(world)
        return
    try:
        world.leave()
        if deadline is not None:
            from dearmpi.comm import mpi

            with deadline:
                mpi.finalize()
    except CommError as error:
        last_words.say(f"[rank {world.rank} on {world.host}] {error}")
        world.abort(error.exit_code)


def _close_without_mpi(world: World) -> None:
    """Close what the program has ended MPI under; what has failed there is told all the same."""
    world.close()
    try:
        world.progress.raise_failure()
    except CommError as error:
        last_words.say(f"[rank {world.rank} on {world.host}] {error}")
        last_words.deliver()
        os._exit(error.exit_code)  # MPI, which would end the job, has ended


def _is_finalized() -> bool:
    """Whether the program has ended MPI."""
    if "mpi4py.MPI" not in sys.modules:  # it may not be installed
        return False
    from dearmpi.comm import mpi

    return mpi.is_finalized()


def abort_on_exception(world: World) -> None:
    """Print an uncaught exception with its rank, then end the job."""

    def report(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        text = "\n".join(filter(None, (_describe(error), advise_on_workers(error))))
        if world.is_closed:
            last_words.say(text)
            return
        if _may_be_victim(error):
            time.sleep(_GRACE_OF_VICTIMS_S)
        told = "\n".join(f"[rank {world.rank} on {world.host}] {line}" for line in text.split("\n"))
        # torch's init_process_group holds sys.stderr back while it calls the hook before its own.
        last_words.say(told, stream=sys.__stderr__ or sys.stderr)
        code = error.exit_code if isinstance(error, DearError) else 1
        world.abort(130 if issubclass(kind, KeyboardInterrupt) else code)

    sys.excepthook = report


def _describe(error: BaseException) -> str:
    """The traceback; before it, for an error raised on purpose, where the user's code met it."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    origin = origin_of(error)
    if not isinstance(error, DearError) or not origin:
        return trace
    return f"{type(error).__name__} at {origin}: {error}\n{trace}"


def _may_be_victim(error: BaseException) -> bool:
    """Whether MPI has failed under it in a way that may come from the end of another rank."""
    if "mpi4py.MPI" not in sys.modules:
        return False
    from dearmpi.comm import mpi

    cause: BaseException | None = error
    while cause is not None and not mpi.may_be_lost_peer(cause):
        cause = cause.__cause__
    return cause is not None
