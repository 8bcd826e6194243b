"""Lifecycle: how a process joins its job and leaves it, so that no rank waits for ever.

``connect`` begins it; ``leave`` and ``abort_on_exception`` end it.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from types import TracebackType
from typing import ClassVar

from dearmpi.comm.api import safe_output
from dearmpi.comm.api.call import origin_of
from dearmpi.comm.api.collectives import Collectives
from dearmpi.comm.process import (
    Deadline,
    advise_on_workers,
    announced_size,
    check_launch,
    end_on_interrupt,
    exit_status,
    ignore_signals,
    keep_from_mpi,
    limit_start,
    note_exit_status,
    refuse_workers,
    report_alone,
)
from dearmpi.comm.watchdog.waits import CURE
from dearmpi.comm.watchdog.watchdog import StallLimits
from dearmpi.comm.world import World
from dearmpi.config import ProgressMode
from dearmpi.errors import (
    UNNAMED,
    CommError,
    ConfigError,
    DearError,
    LaunchError,
    MismatchError,
)
from dearmpi.guessed import CONNECTION, answers_guesses

_POLLS_UNASKED = (
    "this MPI library does not grant MPI_THREAD_MULTIPLE, so every rank runs with "
    "progress='poll': communication advances only while the main thread calls the model, the "
    f"optimizer or the world, and overlaps less. To avoid hangs, {CURE}, which needs a library "
    "that grants it, such as the packages mpich and openmpi. connect(progress='poll') ends this "
    "notice"
)
# MPI may have failed on this rank because another one has ended. The other prints the reason and
# ends the job first: launchers may take 2 s to reach all hosts.
_GRACE_OF_VICTIMS_S = 3.0
_FINALISATION_ALONE_S = 4.0


class _Process:
    """The world of this process, which is made once, as MPI is initialised once."""

    world: ClassVar[World | None] = None
    progress: ClassVar[ProgressMode] = "thread"  # as requested; the world's own may be "poll"


@answers_guesses("connect", CONNECTION)
def connect(
    progress: ProgressMode | None = None,
    *,
    stall_limits: StallLimits | None = None,
    comm: object = None,
) -> World:
    """The world that this process was launched into; the same object at every call.

    progress: ``thread`` (default) or ``poll``; below MPI_THREAD_MULTIPLE always ``poll``.
    stall_limits: how long a wait for other ranks may last; only the first call's count.
    comm: a communicator of mpi4py, of a site or a framework, whose ranks are the world; None: all
    of the job. All of its ranks give it, and it is duplicated. Only the first call may give one.
    From then on an uncaught exception ends the whole job, so that no rank waits for ever. Processes
    that this one starts leave MPI alone, also where they import ``mpi4py.MPI``.
    Raises LaunchError if the launcher announced more ranks than MPI sees, in a process that a rank
    has started, and for a ``comm`` without MPI; ConfigError if ``progress`` differs from that of
    the first call, and for a ``comm`` without this rank; MismatchError where ranks of it give
    another.
    """
    if progress is not None and not isinstance(progress, str):
        raise _refuse_group("progress", progress)
    if _Process.world is None:
        _Process.world = _join_job(progress or "thread", stall_limits, comm)
        _Process.progress = progress or "thread"
    elif comm is not None:
        raise ConfigError(
            "comm is given, but this process was connected before; give it at the first connect(), "
            "or make a group of ranks by world.group(ranks) or world.split(color)",
            code="connected-differently",
        )
    elif progress is not None and progress != _Process.progress:
        raise ConfigError(
            f"progress is {progress!r}, but this process was connected with "
            f"{_Process.progress!r}; choose it at the first connect()",
            code="connected-differently",
        )
    return _Process.world


def choose_world(world: object) -> World:
    """``world``, or for None the one that this process was launched into.

    Raises ConfigError for any other object, such as a process group.
    """
    if world is None:
        return connect()
    if not isinstance(world, World):
        raise _refuse_group("world", world)
    return world


def _refuse_group(name: str, given: object) -> ConfigError:
    wanted = "a World" if name == "world" else "'thread' or 'poll'"
    return ConfigError(
        f"{name} is of type {type(given).__name__}, not {wanted}; leave it out, or pass the world "
        "that dearmpi.connect() returns as world=, or a group of its ranks: world.group(ranks) or "
        "world.split(color). A communicator of mpi4py goes to dearmpi.connect(comm=...)",
        code="wrong-type",
    )


def _join_job(progress: ProgressMode, stall_limits: StallLimits | None, comm: object) -> World:
    """Connect, and see to it that the end of this process keeps no other rank waiting."""
    refuse_workers(os.environ)
    is_first = "mpi4py.MPI" not in sys.modules  # else other code may need MPI to the end
    try:
        world = _connect(progress, stall_limits, comm)
    except LaunchError:
        _end_on_launch_error()
        raise
    except (ConfigError, MismatchError):  # of ``comm``, on this rank perhaps alone
        _end_job_on_refusal()
        raise
    keep_from_mpi(os.environ)
    deadline = None
    if world.size > 1:
        deadline = limit_end(world, stall_limits or StallLimits()) if is_first else None
        abort_on_exception(world)
    atexit.register(leave, world, deadline)
    _leave_before_finalize(world)
    return world


def _connect(
    progress: ProgressMode, stall_limits: StallLimits | None, comm: object = None
) -> World:
    try:
        from dearmpi.comm.backends import mpi

        missing = None if comm is None else mpi.describe_missing
        with limit_start(stall_limits or StallLimits(), missing_of_comm=missing):
            collectives: Collectives = mpi.connect(comm)
    except (ImportError, RuntimeError) as error:
        _require_alone(error, has_comm=comm is not None)
        from dearmpi.comm.backends.alone import AloneCollectives

        return World(AloneCollectives(), progress="poll")
    try:
        if comm is None or not mpi.has_others():  # else a communicator may well have one rank
            check_launch(collectives.size, os.environ)
    except LaunchError as error:
        _limit_end_alone(error.exit_code)
        raise
    if comm is not None and collectives.size == 1 and (alone := mpi.find_alone(comm)):
        safe_output.write(f"[{mpi.origin_in_job()}] {alone}")
    if not mpi.supports_threads():
        if progress != "poll" and collectives.size > 1 and collectives.rank == 0:
            safe_output.write(f"[rank 0 on {collectives.hosts[0]}] {_POLLS_UNASKED}")
        progress = "poll"
    try:
        return World(
            collectives,
            progress=progress,
            stall_limits=stall_limits,
            serves_any_thread=mpi.serves_any_thread(),
        )
    except Exception as error:
        if collectives.size > 1:  # nothing else would end the other ranks, which wait for this one
            host = collectives.hosts[collectives.rank]
            safe_output.write(f"[rank {collectives.rank} on {host}] {error}")
            collectives.abort(error.exit_code if isinstance(error, DearError) else 1)
        raise


def _require_alone(error: Exception, *, has_comm: bool) -> None:
    """Raise LaunchError where MPI cannot be loaded, and this process has others to train with."""
    announced = announced_size(os.environ)
    if announced > 1:
        raise LaunchError(
            f"{announced} ranks were launched, but MPI cannot be loaded: {error}; install one "
            "with pip install 'dearmpi[mpich]', or load your site's MPI module",
            code="mpi-not-loaded",
        ) from error
    if has_comm:  # whose ranks would train apart
        raise LaunchError(
            f"comm is given, but MPI cannot be loaded: {error}; install one with pip install "
            "'dearmpi[mpich]', load your site's MPI module, or leave comm out to train in one "
            "process",
            code="mpi-not-loaded",
        ) from error


def limit_end(world: World, limits: StallLimits) -> Deadline:
    """The deadline for MPI's finalisation, in which no watchdog runs."""
    return Deadline(
        limits,
        origin=f"rank {world.rank} on {world.host}",
        what="the other ranks in MPI's finalisation",
        advice=(
            "every program had ended, but then a rank was stopped or a host cut off. Saved files "
            "are complete; look for processes that are left on "
            f"{', '.join(dict.fromkeys(world.hosts))}"
        ),
    )


def _limit_end_alone(exit_code: int) -> None:
    """End this process with ``exit_code`` at the latest _FINALISATION_ALONE_S after its program.

    MPI started without its launcher may not come to an end: the finalisation has hung in a step of
    SLURM without PMI.
    """
    deadline = Deadline(
        StallLimits(warning_s=_FINALISATION_ALONE_S / 2, abort_s=_FINALISATION_ALONE_S),
        origin=os.uname().nodename,
        what="MPI's finalisation",
        advice="the process ends without it",
        exit_code=exit_code,
    )

    def finalize() -> None:
        from dearmpi.comm.backends import mpi

        with deadline:
            mpi.finalize()

    atexit.register(finalize)


def leave(world: World, deadline: Deadline | None) -> None:
    """Leave the job at the end of the program, once no other rank waits for this one."""
    world.wait_for_abort()
    if exit_status():
        ignore_signals()
    else:
        end_on_interrupt()  # in an exit handler Python prints it, and goes on to wait
    if world.is_closed:  # without a wait for the other ranks, which may have work left
        if exit_status() and world.size > 1 and world.may_be_awaited and not _is_finalized():
            world.abort(exit_status())
        return
    if _is_finalized():
        safe_output.write(
            f"[rank {world.rank} on {world.host}] the program has called MPI.Finalize() while MPI "
            "was still in use, and MPI may end the process for it; leave the call out, since MPI "
            "ends by itself, or call world.leave() on every rank before"
        )
        _close_without_mpi(world)
        return
    try:
        world.leave(exit_status=exit_status())
        if deadline is not None:
            from dearmpi.comm.backends import mpi

            with deadline:
                mpi.finalize()
        world.wait_for_abort()
    except CommError as error:
        world.wait_for_abort()  # which may be why it failed
        safe_output.write(f"[rank {world.rank} on {world.host}] {error}")
        world.abort(error.exit_code)


def _leave_before_finalize(world: World) -> None:
    """Have the program's own ``MPI.Finalize()`` leave first: MPI would end it for a later call."""
    if sys.modules.get("dearmpi.comm.backends.mpi") is None:  # a process that is a world by itself
        return
    from dearmpi.comm.backends import mpi

    def leave_once() -> None:
        if not world.is_closed:  # an exit handler may end MPI, after a status is known
            world.leave(exit_status=exit_status())

    mpi.precede_finalize(leave_once)


def _close_without_mpi(world: World) -> None:
    """Close ``world`` after the program has ended MPI; print a failure that it has kept."""
    world.close()
    try:
        world.progress.raise_failure()
    except CommError as error:
        safe_output.write(f"[rank {world.rank} on {world.host}] {error}")
        safe_output.wait_until_read()
        os._exit(error.exit_code)  # MPI, which would end the job, has ended


def _is_finalized() -> bool:
    """Whether the program has ended MPI."""
    if "mpi4py.MPI" not in sys.modules:  # it may not be installed
        return False
    from dearmpi.comm.backends import mpi

    return mpi.is_finalized()


def abort_on_exception(world: World) -> None:
    """From now on print an uncaught exception with its rank, then end the job."""

    def report(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        world.wait_for_abort()
        ends_alone = not world.may_be_awaited or (world.is_closed and _is_finalized())
        if not ends_alone:
            ignore_signals()
        text = "\n".join(filter(None, (_describe(error), advise_on_workers(error))))
        if ends_alone:
            safe_output.write(text)
            return
        if _may_be_victim(error):
            time.sleep(_GRACE_OF_VICTIMS_S)
        lines = "\n".join(
            f"[rank {world.rank} on {world.host}] {line}" for line in text.split("\n")
        )
        # torch's init_process_group holds sys.stderr back while it calls the previous hook.
        safe_output.write(lines, stream=sys.__stderr__ or sys.stderr)
        code = error.exit_code if isinstance(error, DearError) else 1
        world.abort(130 if issubclass(kind, KeyboardInterrupt) else code)

    sys.excepthook = report
    note_exit_status()


def _end_on_launch_error() -> None:
    """From now on an uncaught LaunchError ends this process with one sentence and its exit code."""
    previous = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, LaunchError):
            previous(kind, error, trace)
            return
        report_alone(error, prefix="dearmpi: ")
        raise SystemExit(error.exit_code)

    sys.excepthook = report


def _end_job_on_refusal() -> None:
    """From now on such an uncaught error ends the job, whose other ranks wait for this one."""
    from dearmpi.comm.backends import mpi

    if not mpi.has_others():
        return
    previous, origin = sys.excepthook, mpi.origin_in_job()

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, (ConfigError, MismatchError)):
            previous(kind, error, trace)
            return
        ignore_signals()
        safe_output.write("\n".join(f"[{origin}] {line}" for line in _describe(error).split("\n")))
        safe_output.wait_until_read()
        mpi.end_job(error.exit_code)

    sys.excepthook = report


_NO_RENDEZVOUS = "environment variable MASTER_ADDR expected"  # what torch says
_RENDEZVOUS_CURE = (
    "dearmpi: something started torch.distributed in this job, as accelerate and transformers do "
    "for CPUs, and mpirun sets no MASTER_ADDR. Run `python -m dearmpi SCRIPT`, or take what "
    "dearmpi.integrations has for the framework"
)


def _describe(error: BaseException) -> str:
    """The traceback; for an error of this package, first a line with the user's own place; and what
    to do where a framework has started torch.distributed.
    """
    trace = "".join(traceback.format_exception(error)).rstrip()
    if _NO_RENDEZVOUS in trace:  # not str(error), which may itself fail
        return f"{trace}\n{_RENDEZVOUS_CURE}"
    origin = origin_of(error)
    if not isinstance(error, DearError) or not origin:
        return trace
    kind = (
        type(error).__name__ if error.code == UNNAMED else f"{type(error).__name__} [{error.code}]"
    )
    return f"{kind} at {origin}: {error}\n{trace}"


def _may_be_victim(error: BaseException) -> bool:
    """Whether MPI failed, possibly because another rank has ended."""
    if "mpi4py.MPI" not in sys.modules:
        return False
    from dearmpi.comm.backends import mpi

    cause: BaseException | None = error
    while cause is not None and not mpi.may_be_lost_peer(cause):
        cause = cause.__cause__
    return cause is not None
