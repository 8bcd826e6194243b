"""Process: a rank as the operating system sees it.

It holds what the launcher has set in the environment, and what a rank's child processes may do. It
also ends a process whose call may never return.

A spawned worker runs the script again. If the script imports ``mpi4py.MPI``, the worker would
initialise MPI as the rank that started it: MPICH ends such a process, Open MPI may end the job.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from multiprocessing import current_process, parent_process
from types import TracebackType
from typing import Any, ClassVar, NoReturn

from dearmpi.comm.api import safe_output
from dearmpi.comm.watchdog.watchdog import StallLimits
from dearmpi.errors import ConfigError, DearError, LaunchError, StallError

_STEP_S = 1.0
_MOST_TRIES = 100


class Deadline:
    """Ends this process with ``exit_code`` if the ``with`` block lasts too long.

    limits: seconds until a warning, and until the end. origin, what, advice: "[origin] has waited
        30 s for what: advice", on standard error; a ``what`` that may change is called then.
        exit_code: default StallError's.
    The thread that ends the process starts at once, since none can start while Python shuts down.
    A call in the block must release the interpreter's lock.
    """

    def __init__(
        self,
        limits: StallLimits,
        *,
        origin: str,
        what: str | Callable[[], str],
        advice: str,
        exit_code: int = StallError.exit_code,
    ) -> None:
        self._limits, self._origin, self._what, self._advice = limits, origin, what, advice
        self._exit_code = exit_code
        self._entered, self._left = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="dearmpi-deadline", daemon=True).start()

    def __enter__(self) -> None:
        self._entered.set()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.set()

    def _watch(self) -> None:
        self._entered.wait()
        warning_s, abort_s = self._limits.warning_s, self._limits.abort_s
        if self._is_left_within(warning_s):
            return
        self._write(f"has waited {warning_s:.0f} s")
        if self._is_left_within(abort_s - warning_s):
            return
        self._write(f"gave up after waiting {abort_s:.0f} s")
        safe_output.flush()
        os._exit(self._exit_code)

    def _is_left_within(self, seconds: float) -> bool:
        """Whether the block ends within ``seconds``, without time in which the job is suspended."""
        while seconds > 0:
            step_s = min(seconds, _STEP_S)
            if self._left.wait(step_s):
                return True
            seconds -= step_s
        return False

    def _write(self, text: str) -> None:
        what = self._what if isinstance(self._what, str) else self._what()
        safe_output.write(f"[{self._origin}] {text} for {what}: {self._advice}")


class _NotedCode:
    """``SystemExit.code``, which notes the code with which Python ends the program.

    member: what the attribute was before. Python reads it when no frame is left.
    """

    def __init__(self, member: Any) -> None:
        self._member = member

    def __get__(self, error: SystemExit | None, kind: type[SystemExit]) -> Any:
        code = self._member.__get__(error, kind)
        is_main = threading.get_ident() == threading.main_thread().ident
        if error is not None and is_main and sys._getframe().f_back is None:
            _Program.exit_status = _status_of(code)
        return code

    def __set__(self, error: SystemExit, code: object) -> None:
        self._member.__set__(error, code)

    def __delete__(self, error: SystemExit) -> None:
        self._member.__delete__(error)


class _Program:
    """The program of this process."""

    exit_status: ClassVar[int] = 0


def note_exit_status() -> None:
    """Have ``exit_status`` know with which status an exception ends the program.

    Python shows it to no handler. Python 3.11 makes no object of what its own ``sys.exit`` raises,
    so that is replaced, also where the script has imported it. Safe to call twice.
    """

    def leave_program(status: object = None, /) -> NoReturn:
        raise SystemExit(status)

    leave_program.__doc__ = sys.exit.__doc__
    original, sys.exit = sys.exit, leave_program
    script = vars(sys.modules["__main__"])
    for name in [name for name, value in script.items() if value is original]:
        script[name] = leave_program
    for name in ("exit", "quit"):  # of the module site, which may not be loaded
        quitter = getattr(builtins, name, None)
        if type(quitter).__module__ == "_sitebuiltins":
            setattr(type(quitter), "__call__", lambda _, code=None: leave_program(code))  # noqa: B010
    # A built-in type lets nobody set its attributes, so the entry goes straight into its dict.
    (attributes,) = gc.get_referents(SystemExit.__dict__)
    if not isinstance(attributes["code"], _NotedCode):
        attributes["code"] = _NotedCode(attributes["code"])
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))  # drops cached look-ups


def exit_status() -> int:
    """The status with which an exception has ended the program; 0 if none has, or with 0."""
    if _Program.exit_status:
        return _Program.exit_status
    uncaught = getattr(sys, "last_type", None)  # printed by a hook that has replaced ours
    if uncaught is None:
        return 0
    return 130 if issubclass(uncaught, KeyboardInterrupt) else 1


def _status_of(code: object) -> int:
    """The exit status that Python makes of the ``code`` of a SystemExit."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def ignore_signals() -> None:
    """Ignore every signal that has a handler of Python, until this process ends.

    A handler, as of a script's timer, might raise in the middle of what ends the process.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return  # Python sets handlers on the main thread alone
    for _ in range(_MOST_TRIES):
        with contextlib.suppress(BaseException):  # of a handler that still runs
            for number in sorted(signal.valid_signals()):
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_IGN)
            return


def end_on_interrupt() -> bool:
    """From now on Ctrl-C ends this process at once; whether that is a change.

    Python acts on it between two instructions only, and so never inside of a call that waits for
    other ranks. A handler of the script's own stays.
    """
    if (
        threading.get_ident() != threading.main_thread().ident
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        return False
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return True


def skip_exit_handlers() -> None:
    """Make a call of C's exit() end this process at once, with the same status.

    Call it right before a call of exit(): handlers run last in, first out. Handlers of libraries
    destroy data that other threads still use, and the process would end by a signal. Changes
    nothing where the C library has no on_exit(), as on macOS.
    """
    libc = ctypes.CDLL(None)
    on_exit = getattr(libc, "on_exit", None)
    if on_exit is not None:
        # _exit() itself; a Python function would wait for the interpreter's lock.
        on_exit(libc._exit, None)


# Under hydra SLURM's variables count nodes, so they come last.
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_LOCAL_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "SLURM_STEP_")
_MOST_NAMES = 4
# A launcher may end the job when the first rank ends: the one that reports must not be cut off.
_GRACE_OF_SILENT_S = 10.0


def is_from_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether torchrun started this process, possibly under another launcher; or, without one, what
    sets torchrun's variables, such as a cluster's own start of each rank.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        return True
    return {"RANK", "WORLD_SIZE"} <= environment.keys() and not is_launched(environment)


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher started this process, or a parent that passed its environment on."""
    return any(name in environment for name in (*_SIZE_VARIABLES, *_RANK_VARIABLES))


def announced_size(environment: Mapping[str, str]) -> int:
    """The number of ranks that the launcher announced; 1 if none did."""
    names = ("WORLD_SIZE",) if is_from_torchrun(environment) else _SIZE_VARIABLES
    for name in names:
        value = environment.get(name, "")
        if value.isdigit():
            return int(value)
    return 1


def announced_rank(environment: Mapping[str, str]) -> str:
    """The rank of this process, as the launcher writes it; 0 without a launcher."""
    names = ("RANK",) if is_from_torchrun(environment) else _RANK_VARIABLES
    return next((environment[name] for name in names if name in environment), "0")


def report_alone(error: DearError, *, prefix: str) -> None:
    """Print ``error`` with ``prefix`` where there is no world in which to agree on who does.

    Wrong settings and a wrong launch are met by every rank and reported by the first. MPI, or a
    file, may be missing on one host alone, whose first rank reports it. Anything else may be met by
    one rank.
    Ranks that stay silent wait ten seconds.
    """
    rank = announced_rank(os.environ)
    is_missing = error.code in ("mpi-not-loaded", "file-missing")
    silent = False
    met_by_one = is_missing or error.code == "mpi-not-started"
    if isinstance(error, (ConfigError, LaunchError)) and not met_by_one:
        silent = rank != "0"
    elif announced_size(os.environ) > 1:
        local = (os.environ[name] for name in _LOCAL_RANK_VARIABLES if name in os.environ)
        silent = is_missing and next(local, "0") != "0"
        prefix = f"[rank {rank} on {os.uname().nodename}] "
    if silent:
        time.sleep(_GRACE_OF_SILENT_S)
        return
    lines = f"error: {error.with_code()}".splitlines()
    safe_output.flush()
    safe_output.write("\n".join(f"{prefix}{line}" for line in lines))


def check_launch(world_size: int, environment: Mapping[str, str]) -> None:
    """Raise LaunchError if processes that should form one world are worlds of their own."""
    announced = announced_size(environment)
    if world_size == 1 and announced > 1:
        if is_from_torchrun(environment):
            starter, cure = "torchrun", ""
            if "TORCHELASTIC_RUN_ID" not in environment:
                starter = f"what set RANK={environment['RANK']} and WORLD_SIZE={announced}"
                cure = "; to train in one process, unset RANK and WORLD_SIZE"
            raise LaunchError(
                f"{starter} launched {announced} processes, but MPI sees each as a world of its "
                f"own: torchrun and its like start no MPI. Start them with mpirun -n {announced} "
                f"python instead, or with srun{cure}",
                code="launcher-mismatch",
            )
        raise LaunchError(
            f"{announced} processes were launched, but MPI sees each as a world of its own: the "
            "launcher and the MPI library do not match. With srun, use --mpi=pmi2 (MPICH) or "
            "--mpi=pmix (Open MPI); else use the mpirun that belongs to the library.",
            code="launcher-mismatch",
        )


def failed_start(library: str, environment: Mapping[str, str]) -> LaunchError:
    """The error of a process that MPI has ended while it started, with the likely cure.

    library: the version text of the MPI library. MPICH ends processes so under a launcher that
    speaks PMIx, unless it was built for PMIx, and where a launcher does not answer. For Open MPI
    under another launcher ``check_launch`` finds out.
    """
    launcher, cure = _find_pmix_launcher(environment)
    names = [name for name in sorted(environment) if name.startswith(_LAUNCHER_PREFIXES)]
    is_unsure = "MPICH" in library and "MPIR_CVAR_PMI_VERSION" not in environment
    if is_unsure and {"PMI_SIZE", "PMIX_NAMESPACE"} <= environment.keys():
        advice = (
            "The mpirun of MPICH was called inside a step of SLURM that speaks PMIx, and MPICH "
            "may refuse to choose between the two: export MPIR_CVAR_PMI_VERSION=1 before mpirun"
        )
    elif launcher and "MPICH" in library and "pmix" not in library:
        advice = f"{launcher} has started this process, but its MPI library is MPICH; use {cure}"
    elif names:
        advice = (
            f"The environment names a launcher ({', '.join(names[:_MOST_NAMES])}). If it has not "
            "started this process, unset these variables; else use the mpirun that belongs to the "
            "library"
        )
    else:
        advice = "If the message is about the network, look at the settings of UCX and libfabric"
    return LaunchError(
        f"MPI has ended this process while it started; its own message stands above. {advice}",
        code="mpi-not-started",
    )


@contextlib.contextmanager
def reported_exit(report: Callable[[], None]) -> Iterator[None]:
    """Call ``report`` if a library in the block calls C's exit(), before any handler of it.

    Changes nothing where the C library is not glibc, whose handlers can be taken back.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        yield
        return
    is_inside = True

    def handle(_: int | None) -> None:
        if is_inside:
            report()

    handler = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(handle)
    owner = ctypes.create_string_buffer(1)  # its address stands for a library of its own
    getattr(libc, "__cxa_atexit")(handler, None, owner)
    try:
        yield
    finally:
        is_inside = False
        getattr(libc, "__cxa_finalize")(owner)  # calls the handler, and forgets it


def refuse_launcher(library: str, environment: Mapping[str, str]) -> None:
    """Raise LaunchError where MPICH would end the process while MPI starts, with its own message.

    library: the version text of the MPI library. MPICH's own builds list how they were configured,
    so whether they speak PMIx is known; for those of vendors there is ``failed_start``.
    """
    _, is_listed, configured = library.partition("MPICH configure:")
    speaks_pmi_of_others = "pmi" in configured.partition("\n")[0]
    if not is_listed or speaks_pmi_of_others or "MPIR_CVAR_PMI_VERSION" in environment:
        return
    launcher, cure = _find_pmix_launcher(environment)
    announced = announced_size(environment)
    if launcher and "PMI_SIZE" not in environment and announced > 1:
        raise LaunchError(
            f"{launcher} has started {announced} processes, but their MPI library is MPICH, which "
            f"cannot start under it; use {cure}",
            code="launcher-mismatch",
        )


def _find_pmix_launcher(environment: Mapping[str, str]) -> tuple[str, str]:
    """The launcher under which MPICH may not start, and what to use; two empty texts for others."""
    own = "the mpirun that belongs to the library; that of pip's mpich lies beside python"
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return "Open MPI's launcher", own
    if "PMIX_NAMESPACE" in environment and "PMI_RANK" not in environment:
        return "A launcher that speaks PMIx", f"srun --mpi=pmi2, or {own}"
    return "", ""


def tcp_defaults(library: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What to tell the MPI library before it starts, so that it uses the whole of a TCP link.

    Nothing that the user has set in ``environment``. library: its version text.

    Open MPI "puts" a large message as a whole, and what the receiver needs to send its own waits
    behind it. MPICH's UCX reads 64 KiB of a connection in a poll. A thread that leaves the cores to
    computation polls seldom.
    """
    if library.startswith("Open MPI"):
        told = {"OMPI_MCA_btl_tcp_flags": "send,inplace"}
    else:
        transports = environment.get("UCX_TLS", "all").split(",")
        # UCX warns of a setting that it has no use for; adapters of InfiniBand are named with ":".
        is_used = not {"tcp", "all"}.isdisjoint(transports)
        uses_tcp = is_used and ":" not in environment.get("UCX_NET_DEVICES", "")
        told = {"UCX_TCP_RX_SEG_SIZE": "1m"} if uses_tcp else {}
    return {name: value for name, value in told.items() if name not in environment}


def limit_start(
    limits: StallLimits, *, missing_of_comm: Callable[[], str] | None = None
) -> Deadline:
    """The deadline for MPI's initialisation, which returns when every rank has called it.

    missing_of_comm: the script gave a communicator, which its ranks duplicate together; tells what
        this one waits for.
    """
    rank, size = announced_rank(os.environ), announced_size(os.environ)
    if missing_of_comm is not None:
        return Deadline(
            limits,
            origin=f"rank {rank} on {os.uname().nodename}",
            what=missing_of_comm,
            advice=(
                "a rank of it has not reached the call, has ended, or has given another one. Give "
                "one and the same comm on all of its ranks, such as what one call of "
                "MPI.COMM_WORLD.Split() returned"
            ),
        )
    return Deadline(
        limits,
        origin=f"rank {rank} on {os.uname().nodename}",
        what=f"all {size} ranks to start MPI" if size > 1 else "MPI to start",
        advice=(
            "a rank that does not print this line has not reached dearmpi.connect(), or has given "
            "it a comm: it hangs or was stopped before, or the network does not let its host reach "
            "the others"
        ),
    )


@dataclass(frozen=True, slots=True)
class Library:
    """The MPI library in use.

    abi: ``mpich`` or ``openmpi`` where mpi4py chose between the two at import, else ``its own``.
    thread_level: such as ``MPI_THREAD_MULTIPLE``; empty where MPI cannot start.
    device: the library's text on its transports, or empty.
    """

    name: str
    version: str
    mpi4py: str
    abi: str
    thread_level: str
    device: str = ""


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
    shown = "".join(traceback.format_exception_only(error))  # even if its own str() raises
    if not any(words in shown for words in _ENDED) or not _main_uses_mpi():
        return ""
    return (
        "If the workers were spawned, each has run the script again: MPI is not initialised "
        "there, and a call such as MPI.COMM_WORLD.Get_rank() at the top of the script ends it. "
        "Move such calls under if __name__ == '__main__':, or into functions that workers do not "
        "call"
    )


def _main_uses_mpi() -> bool:
    """Whether the script has ``mpi4py.MPI``, or an object of it, at its top."""
    module = sys.modules.get("mpi4py.MPI")
    values = list(vars(sys.modules["__main__"]).values())
    return module is not None and any(
        value is module or type(value).__module__ == "mpi4py.MPI" for value in values
    )
