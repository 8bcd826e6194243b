"""Workers: processes that a rank starts, as for loading data, and that are no ranks.

A spawned worker runs the script again. If the script imports ``mpi4py.MPI``, the worker would
initialise MPI as the rank that started it: MPICH ends such a process, Open MPI may end the job.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from multiprocessing import current_process, parent_process

from dearmpi.comm.process.launch import announced_rank, is_launched
from dearmpi.errors import LaunchError

_INITIALIZE = "MPI4PY_RC_INITIALIZE"  # read by mpi4py when MPI is imported
_ENDED = ("exited unexpectedly", "terminated abruptly", "terminated with exit code")


def keep_from_mpi(environment: MutableMapping[str, str]) -> None:
    """Make ``mpi4py`` leave MPI uninitialised in processes that this rank starts from now on.

    Keeps a setting that ``environment`` has already.
    """
    if is_launched(environment):
        environment.setdefault(_INITIALIZE, "0")


def refuse_workers(environment: Mapping[str, str]) -> None:
    """Raise LaunchError in a process that a rank has started by multiprocessing."""
    # While a worker runs the script, it has no parent process yet, but this mark.
    is_worker = parent_process() is not None or getattr(current_process(), "_inheriting", False)
    if is_worker and is_launched(environment):
        raise LaunchError(
            f"connect() was called in a process that rank {announced_rank(environment)} has "
            "started, such as a worker of a data loader. A worker is no rank, but it runs the "
            "script again: put the code that starts training under if __name__ == '__main__':",
            code="connect-in-worker",
        )


def advise_on_workers(error: BaseException) -> str:
    """Advice to print with ``error``, if a worker has ended and the script uses MPI at its top.

    Empty otherwise.
    """
    if not any(words in str(error) for words in _ENDED) or not _main_uses_mpi():
        return ""
    return (
        "If the workers were spawned, each has run the script again: MPI is not initialised "
        "there, and a call such as MPI.COMM_WORLD.Get_rank() at the top of the script ends it. "
        "Move such calls under if __name__ == '__main__':, or into functions that workers do not "
        "call"
    )


def _main_uses_mpi() -> bool:
    """Whether the script has ``mpi4py.MPI``, or an object of it, at its top."""
    values = vars(sys.modules["__main__"]).values()
    names = (getattr(value, "__name__", None) for value in list(values))
    kinds = (type(value).__module__ for value in list(values))
    return "mpi4py.MPI" in names or "mpi4py.MPI" in kinds
