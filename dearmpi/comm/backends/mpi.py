"""Collectives over MPI; the only file that imports mpi4py.

mpi4py's reduction requests do not keep their buffers alive, so every request here does. MPI gets
raw addresses: nothing synchronises a stream. A buffer of any dtype moves as integers of its width,
since MPI has no portable half precision.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import mpi4py

# mpi4py would initialise MPI here and hold the interpreter's lock meanwhile; initialize() does not.
# It would also finalise MPI in forks of this process, where the call never returns.
if mpi4py.rc.initialize and "mpi4py.MPI" not in sys.modules:
    _FINALIZES = _AT_EXIT = mpi4py.rc.finalize is not False
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
else:
    _FINALIZES, _AT_EXIT = mpi4py.rc.finalize is not False, False

from mpi4py import MPI

from dearmpi.comm.algorithms.algorithm import SendScheduler
from dearmpi.comm.algorithms.registry import AlgorithmCollectives
from dearmpi.comm.api.collectives import AllOf, Buffer, ReduceOp, Request
from dearmpi.comm.process import (
    Library,
    end_on_interrupt,
    failed_start,
    refuse_launcher,
    report_alone,
    reported_exit,
    skip_exit_handlers,
    tcp_defaults,
)
from dearmpi.cuts import Cuts
from dearmpi.errors import CommError, ConfigError, LaunchError, MismatchError

_ARITHMETIC = {
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "int16": MPI.INT16_T,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
    "uint8": MPI.UINT8_T,
}
_BY_WIDTH = {
    1: MPI.UINT8_T,
    2: MPI.UINT16_T,
    4: MPI.UINT32_T,
    8: MPI.UINT64_T,
    16: MPI.C_DOUBLE_COMPLEX,
}
_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
_THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
    MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
    MPI.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE",
}
_ABORT_S = 10  # how long an abort may take
_MESSAGE_TAG = 32767  # the largest that every MPI has
_COMM_TAG = _MESSAGE_TAG - 1  # on MPI_COMM_WORLD, of what ranks give to connect()
_QUESTION = b"?"  # before what a rank gives: whether another still waits in connect()
_POLL_S = 1e-3
_SETTLE_S = 2.0  # after which ranks that still wait in connect() ask others
_NUM_ROUNDS = 200  # of questions to all; a duplicate needs a few, each while all look for messages
_LONG = 100  # ranks as text


class MpiRequest(Request):
    """An MPI request that keeps its buffers alive until it is complete."""

    def __init__(self, request: MPI.Request, *held: object) -> None:
        self._request: MPI.Request | None = request
        self._held = held

    def test(self) -> bool:
        if self._request is None:
            return True
        if not self._request.Test():
            return False
        self._request, self._held = None, ()
        return True


class MpiCollectives(AlgorithmCollectives):
    """``Collectives`` on one communicator."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        rank: int,
        hosts: tuple[str, ...],
        scheduler: SendScheduler,
        given: GivenComm | None = None,
    ) -> None:
        """rank, hosts: in ``comm``; a duplicate that is not complete yet cannot be queried. given:
        what it is a duplicate of, where others may give this rank another one.
        """
        super().__init__(rank=rank, hosts=hosts, scheduler=scheduler)
        self._comm, self._given = comm, given

    def start_all_reduce(self, buffer: Buffer, op: ReduceOp) -> Request:
        request = self._comm.Iallreduce(MPI.IN_PLACE, _spec(buffer), _OPS[op])
        return MpiRequest(request, buffer)

    def start_broadcast(self, buffer: Buffer, root: int) -> Request:
        return MpiRequest(self._comm.Ibcast(_spec(buffer, moved=True), root), buffer)

    def start_duplicate(self) -> tuple[MpiCollectives, Request]:
        comm, request = self._comm.Idup()
        twin = MpiCollectives(comm, rank=self.rank, hosts=self.hosts, scheduler=self.scheduler)
        return twin, MpiRequest(request, comm)

    def make_group(self, ranks: Sequence[int], number: int) -> MpiCollectives:
        members = self._comm.Get_group().Incl(list(ranks))
        comm = self._comm.Create_group(members, number % _MESSAGE_TAG)
        members.Free()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        hosts = tuple(self.hosts[rank] for rank in ranks)
        # With one scheduler for all, since they share the wire.
        return MpiCollectives(comm, rank=comm.rank, hosts=hosts, scheduler=self.scheduler)

    def free(self) -> None:
        self._comm.Free()

    def start_message(self, data: bytes, destination: int) -> Request:
        request = self._comm.Isend([data, len(data), MPI.BYTE], destination, _MESSAGE_TAG)
        return MpiRequest(request, data)

    def receive_message(self) -> tuple[int, bytes] | None:
        if MPI.Is_finalized():  # by the program, while the progress thread still polls
            return None
        if self._given is not None:
            self._given.answer_others()
        return _receive(self._comm, _MESSAGE_TAG)

    def abort(self, code: int) -> None:
        """End the whole job; this process ends after ``_ABORT_S`` in any case.

        Aborts MPI_COMM_WORLD, which the launcher ends. MPICH answers an abort of any other
        communicator with exit() in the peers, inside their MPI calls, under threads that compute.
        """
        # MPI waits for the launcher, perhaps for ever, and holds the interpreter's lock meanwhile:
        # only the system can end the process then. Python lets the main thread alone set handlers.
        libc = ctypes.CDLL(None)
        libc.signal(int(signal.SIGALRM), None)
        libc.alarm(_ABORT_S)
        skip_exit_handlers()
        end_job(code)

    def start_send(self, buffer: Buffer, destination: int, tag: int) -> Request:
        return MpiRequest(self._comm.Isend(_spec(buffer, moved=True), destination, tag), buffer)

    def start_receive(self, buffer: Buffer, source: int, tag: int) -> Request:
        return MpiRequest(self._comm.Irecv(_spec(buffer, moved=True), source, tag), buffer)

    def check_addable(self, buffer: Buffer) -> None:
        dtype = _name(buffer)
        if dtype not in _ARITHMETIC:
            raise ConfigError(
                f"reduce_scatter is 'native', but MPI cannot add {dtype}; use 'exchange' (fp32 "
                "sums) or 'ring'",
                code="dtype-not-served",
            )

    def start_library_reduce_scatter(self, buffer: Buffer, total: Buffer, cuts: Cuts) -> Request:
        if cuts.is_even:
            count = cuts.largest
            request = self._comm.Ireduce_scatter_block(
                _spec(buffer, count), _spec(total, count), MPI.SUM
            )
            return MpiRequest(request, buffer, total)
        # Not by Ireduce_scatter: mpi4py frees the counts, which MPI may read until the end.
        parts: list[Request] = []
        for owner in range(self.size):
            if cuts.size_of(owner):
                sent = _spec(buffer[cuts.slice_of(owner)])
                room = _spec(total) if owner == self.rank else None
                request = self._comm.Ireduce(sent, room, MPI.SUM, owner)
                parts.append(MpiRequest(request, buffer, total))
        return AllOf(parts)

    def start_library_all_gather(self, buffer: Buffer, cuts: Cuts) -> Request:
        if cuts.is_even:
            spec = _spec(buffer, cuts.largest, moved=True)
            return MpiRequest(self._comm.Iallgather(MPI.IN_PLACE, spec), buffer)
        memory, _, datatype = _spec(buffer, moved=True)
        counts = [cuts.size_of(rank) for rank in range(self.size)]
        spec = [memory, counts, list(cuts.offsets[:-1]), datatype]
        return MpiRequest(self._comm.Iallgatherv(MPI.IN_PLACE, spec), buffer)


def end_job(code: int) -> NoReturn:
    """End all ranks that the launcher started, whatever communicator they use.

    After MPI's finalisation only this one, with whose status the launcher ends.
    """
    if not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(code)
    os._exit(code)  # MPICH returns in the second of two ranks that abort at once


def origin_in_job() -> str:
    """This process, before there is a world: its rank and its host."""
    return f"rank {MPI.COMM_WORLD.rank} on {MPI.Get_processor_name()}"


def has_others() -> bool:
    """Whether the launcher started other ranks beside this one."""
    return bool(MPI.COMM_WORLD.size > 1)


def connect(comm: object = None) -> MpiCollectives:
    """Initialise MPI, asking for MPI_THREAD_MULTIPLE, and duplicate ``comm`` of mpi4py, or its
    world communicator.

    Waits for all ranks without the interpreter's lock, so that other threads can act. Raises
    ConfigError for a ``comm`` that is none; MismatchError where ranks of it give another.
    """
    initialize()
    given = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(given, MPI.Intracomm) or given == MPI.COMM_NULL:
        raise ConfigError(
            f"comm is {_name_comm(given)}; pass a communicator of mpi4py that this rank belongs "
            "to, such as what MPI.COMM_WORLD.Split() returns. A rank of none leaves connect() out",
            code="wrong-type",
        )
    _Joining.given = joining = GivenComm(given)
    comm = joining.duplicate()
    _Joining.given = None
    comm.Set_errhandler(MPI.ERRORS_RETURN)  # duplicates inherit it
    return MpiCollectives(
        comm,
        rank=comm.rank,
        hosts=_hosts_of(comm),
        scheduler=SendScheduler(),
        given=joining if joining.may_differ else None,
    )


class _Joining:
    """What this process gives to the connect() that it is in."""

    given: ClassVar[GivenComm | None] = None


def describe_missing() -> str:
    """What a rank in connect(comm=...) waits for."""
    given = _Joining.given
    return "MPI to start" if given is None else given.describe_missing()


def find_alone(comm: object) -> str:
    """What to say of ``comm``, which has this rank alone of several in the job. Empty on all but
    the first rank where a script gives MPI.COMM_SELF, as it then does on all.
    """
    job = MPI.COMM_WORLD
    if job.size == 1 or (comm == MPI.COMM_SELF and job.rank):
        return ""
    return (
        f"comm has this rank alone, of {job.size} in the job: it trains a model of its own, and "
        "nothing is averaged with other ranks. To train together, leave comm out, or give all of "
        "them one communicator"
    )


class GivenComm:
    """A communicator that a script gives, which is duplicated once all of its ranks give it.

    Its first rank tells the others what it gives, and they it, by messages of all of the job. Ranks
    that give MPI.COMM_WORLD tell nobody, since others may have come without a word; but they hear.
    A rank that is connected goes on hearing, and answers those that give it another one.

    may_differ: whether its ranks may give each other another one, even where all of it have come.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self._ranks = comm, _ranks_in_job(comm)
        self._own = _describe_comm(comm, self._ranks)
        is_whole = MPI.Comm.Compare(comm, MPI.COMM_WORLD) == MPI.IDENT
        # To ranks of a job that was spawned leads no communicator that all have.
        self.may_differ = not is_whole and MPI.UNDEFINED not in self._ranks
        self._is_first = comm.rank == 0
        others = self._ranks[1:] if self._is_first else self._ranks[:1]
        self._askable = frozenset(others if self.may_differ or is_whole else ())
        self._peers = self._askable if self.may_differ else frozenset[int]()
        self._heard: set[int] = set()
        self._answered: set[int] = set()  # in this round of questions
        self._num_rounds = 0
        self._sent: list[MPI.Request] = []

    def duplicate(self) -> MPI.Intracomm:
        """A duplicate (collective). Raises MismatchError where a rank of it gives another
        communicator, for whose ranks all would wait.
        """
        for peer in self._peers:
            self._tell(peer)
        comm, request = self._comm.Idup()
        is_made, settled_at = False, time.monotonic() + _SETTLE_S
        while not is_made or not self._heard.issuperset(self._peers):
            is_made = is_made or request.Test()
            self._hear()
            if not is_made and time.monotonic() > settled_at:
                self._ask()
            time.sleep(_POLL_S)
        MPI.Request.Waitall(self._sent)
        self._sent.clear()
        return comm

    def describe_missing(self) -> str:
        """The ranks that have not come yet, as far as this one knows."""
        missing = sorted(self._peers - self._heard)
        if missing:
            named = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of the job"
        elif self._is_first or not self._peers:
            named = "all ranks of it"
        else:
            named = f"others of it, which rank {self._ranks[0]} of the job names,"
        return f"{named} to call dearmpi.connect(comm=...) with {self._own.decode()}"

    def answer_others(self) -> None:
        """Tell ranks that wait in connect() with another communicator what this rank has given."""
        while (message := _receive(MPI.COMM_WORLD, _COMM_TAG)) is not None:
            source, data = message
            if data.removeprefix(_QUESTION) != self._own:
                self._sent = [request for request in self._sent if not request.Test()]
                self._tell(source)

    def _tell(self, peer: int, mark: bytes = b"") -> None:
        data = mark + self._own
        self._sent.append(MPI.COMM_WORLD.Isend([data, len(data), MPI.BYTE], peer, _COMM_TAG))

    def _hear(self) -> None:
        """Note ranks that have just told what they give. Raises MismatchError if it differs."""
        while (message := _receive(MPI.COMM_WORLD, _COMM_TAG)) is not None:
            source, data = message
            told = data.removeprefix(_QUESTION)
            if told != self._own:
                raise MismatchError(
                    f"{origin_in_job()} gives connect() {self._own.decode()}, and rank {source} "
                    f"gives it {told.decode()}. Each would wait for ranks that never come. Give "
                    "one and the same comm on all of its ranks, such as what one call of "
                    "MPI.COMM_WORLD.Split() returned",
                    code="ranks-in-different-calls",
                )
            if data.startswith(_QUESTION) and self.may_differ:
                self._tell(source)
            (self._answered if source in self._heard else self._heard).add(source)

    def _ask(self) -> None:
        """Find out why a rank still waits.

        One that gives MPI.COMM_WORLD asks once: those that another one has connected answer. The
        first rank of another one asks those that have all come, again and again. All of them drive
        MPI meanwhile. Raises MismatchError when it would long have made a duplicate.
        """
        if not self.may_differ:
            has_to = self._num_rounds == 0
        else:
            of_round = self._answered if self._num_rounds else self._heard
            has_to = self._is_first and of_round.issuperset(self._askable)
        if not has_to:
            return
        if self._num_rounds == _NUM_ROUNDS:
            raise MismatchError(
                f"all {len(self._ranks)} ranks have given connect() {self._own.decode()}, but not "
                "the same one: there are several of these ranks, and a rank waits only for those "
                "that give its own. Give one and the same comm on all of its ranks, such as what "
                "one call of MPI.COMM_WORLD.Split() returned",
                code="ranks-in-different-calls",
            )
        self._num_rounds += 1
        self._answered.clear()
        for rank in self._askable:
            self._tell(rank, _QUESTION)


def _receive(comm: MPI.Comm, tag: int) -> tuple[int, bytes] | None:
    """A message that has come, and the rank that sent it; None if there is none."""
    status = MPI.Status()
    message = comm.Improbe(MPI.ANY_SOURCE, tag, status)
    if message is None:
        return None
    data = bytearray(status.Get_count(MPI.BYTE))
    message.Recv([data, len(data), MPI.BYTE])
    return status.source, bytes(data)


def _ranks_in_job(given: MPI.Intracomm) -> list[int]:
    group, of_job = given.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = MPI.Group.Translate_ranks(group, list(range(group.size)), of_job)
    group.Free()
    of_job.Free()
    return [int(rank) for rank in ranks]


def _describe_comm(given: MPI.Intracomm, ranks: Sequence[int]) -> bytes:
    """In few bytes, the same on all of its ``ranks``."""
    if MPI.Comm.Compare(given, MPI.COMM_WORLD) == MPI.IDENT:
        return b"MPI.COMM_WORLD, as without comm"
    named = str(list(ranks))
    checksum = f" (checksum {zlib.crc32(named.encode())})" if len(named) > _LONG else ""
    more = f"{named[:_LONG]} ..." if checksum else named
    return f"a communicator of the job's ranks {more}{checksum}".encode()


def _name_comm(given: object) -> str:
    """What is given in place of a communicator of ranks."""
    if not isinstance(given, MPI.Comm):
        return f"of type {type(given).__name__}"
    if given == MPI.COMM_NULL:
        return "MPI.COMM_NULL, as where it was freed or has no place for this rank"
    return "an inter-communicator, whose two groups are no one world"


def initialize() -> None:
    """Initialise MPI as ``mpi4py.rc`` says; does nothing if it is initialised.

    Raises RuntimeError if MPI fails; LaunchError if it would end the process under its launcher.
    Where MPI ends the process all the same, prints a LaunchError and ends it with that exit code.
    """
    if MPI.Is_initialized():
        return
    library = MPI.Get_library_version()
    refuse_launcher(library, os.environ)
    os.environ.update(tcp_defaults(library, os.environ))
    level = str(mpi4py.rc.thread_level).upper() if mpi4py.rc.threads else "SINGLE"
    requested, provided = getattr(MPI, f"THREAD_{level}"), ctypes.c_int()
    start = ctypes.CDLL(MPI.__file__).MPI_Init_thread
    ends = end_on_interrupt()  # MPI waits here for ranks that an interrupt may have ended
    try:
        with reported_exit(_end_unstarted):
            code = start(None, None, requested, ctypes.byref(provided))
    finally:
        if ends:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if code:
        raise RuntimeError(f"MPI_Init_thread failed with code {code}")
    for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    if _AT_EXIT:
        atexit.register(_finalize_only_in, os.getpid())


def _end_unstarted() -> None:
    """End this process, as MPI does while it starts, with an error in place of MPI's status."""
    error = failed_start(MPI.Get_library_version(), os.environ)
    report_alone(error, prefix="dearmpi: ")
    os._exit(error.exit_code)


def finalize() -> None:
    """End MPI; waits for all ranks without the interpreter's lock, so that other threads can act.

    Does nothing if ``mpi4py.rc.finalize`` is False, or MPI has ended.
    Raises CommError if MPI fails.
    """
    if not _FINALIZES or MPI.Is_finalized():
        return
    # mpi4py's own call would hold the lock, and comes when no Python thread can run any more.
    code = ctypes.CDLL(MPI.__file__).MPI_Finalize()
    if code:
        raise CommError(f"MPI_Finalize failed with code {code}", code="operation-failed")


def precede_finalize(act: Callable[[], None]) -> None:
    """Have ``act`` called first wherever the program calls ``MPI.Finalize()`` from now on.

    A name bound before, as by ``from mpi4py.MPI import Finalize``, ends MPI without it.
    """
    finalize_at_once = MPI.Finalize

    def act_and_finalize() -> None:
        act()
        finalize_at_once()

    setattr(MPI, "Finalize", act_and_finalize)  # noqa: B010  a stub's function takes no assignment


def is_finalized() -> bool:
    """Whether MPI has ended: any further call would end this process."""
    return bool(MPI.Is_finalized())


def may_be_lost_peer(error: BaseException) -> bool:
    """Whether MPI's ``error`` may be the consequence of another rank's end."""
    unspecific = (MPI.ERR_OTHER, MPI.ERR_INTERN, MPI.ERR_UNKNOWN)
    return isinstance(error, MPI.Exception) and error.Get_error_class() in unspecific


def _finalize_only_in(process: int) -> None:
    if os.getpid() == process:
        finalize()


def supports_threads() -> bool:
    """Whether a thread beside the main one may call MPI."""
    initialize()
    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def serves_any_thread() -> bool:
    """Whether threads other than the main one may call MPI, if only one does at a time."""
    initialize()
    return bool(MPI.Query_thread() >= MPI.THREAD_SERIALIZED)


def claims_cuda() -> bool:
    """Whether the library claims to take CUDA memory; False if it has no query for it."""
    initialize()
    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return query is not None and bool(query())


def describe() -> str:
    """The MPI library and mpi4py, in one line."""
    library = MPI.Get_library_version().split("\n")[0].strip()
    return f"{' '.join(library.split())}, mpi4py {mpi4py.__version__}"


def library() -> Library:
    """The MPI library that this process is connected to, or that its launcher does not fit."""
    try:
        initialize()
        thread_level = _THREAD_LEVELS[MPI.Query_thread()]
    except LaunchError:
        thread_level = ""
    name, numbers = MPI.get_vendor()
    lines = (line.partition(":") for line in MPI.Get_library_version().splitlines())
    variant = Path(MPI.__file__).name.split(".")[1]
    return Library(
        name=name,
        version=".".join(map(str, numbers)),
        mpi4py=mpi4py.__version__,
        abi=variant if variant in ("mpich", "openmpi") else "its own",
        thread_level=thread_level,
        device=next((value.strip() for key, _, value in lines if key.endswith("Device")), ""),
    )


def _hosts_of(comm: MPI.Comm) -> tuple[str, ...]:
    """The name of each rank's host (collective)."""
    width = MPI.MAX_PROCESSOR_NAME
    own = MPI.Get_processor_name().encode(errors="surrogatepass").ljust(width, b"\0")
    names = bytearray(comm.size * width)
    comm.Allgather([own, width, MPI.BYTE], [names, width, MPI.BYTE])
    rows = (bytes(names[start : start + width]) for start in range(0, len(names), width))
    return tuple(row.rstrip(b"\0").decode(errors="surrogatepass") for row in rows)


def _name(buffer: Buffer) -> str:
    return str(buffer.dtype).removeprefix("torch.")


def _spec(buffer: Buffer, count: int | None = None, *, moved: bool = False) -> list[Any]:
    """``buffer`` for mpi4py: memory, count and datatype. ``moved``: sent without arithmetic."""
    width = buffer.element_size()
    memory = MPI.memory.fromaddress(buffer.data_ptr(), buffer.numel() * width)
    datatype = _BY_WIDTH[width] if moved else _ARITHMETIC[_name(buffer)]
    return [memory, buffer.numel() if count is None else count, datatype]
