"""Collectives over MPI; the only file that knows mpi4py.

mpi4py's reduction requests do not keep their buffers alive, so every request here does. Addresses
are handed over raw: nothing synchronises a stream, and a buffer of any dtype moves as integers of
its width, since MPI has no portable half precision.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import mpi4py

# mpi4py would initialise MPI here and hold the interpreter's lock meanwhile; initialize() does not.
if mpi4py.rc.initialize and "mpi4py.MPI" not in sys.modules:
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = mpi4py.rc.finalize is not False

from mpi4py import MPI

from dearmpi.comm.api import Buffer, Completed, ReduceOp, Request
from dearmpi.comm.library import Library
from dearmpi.comm.ring import CHUNK_BYTES, RingAllGather, RingReduceScatter, Way, num_receives
from dearmpi.comm.scratch import Scratch, ScratchRequest, add_in_order, carrier_of
from dearmpi.comm.traffic import Traffic
from dearmpi.config import AllGather, ReduceScatter, WireDtype
from dearmpi.errors import CommError, ConfigError

_ARITHMETIC = {
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
    "uint8": MPI.UINT8_T,
}
_BY_WIDTH = {1: MPI.UINT8_T, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T}
_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
_THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
    MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
    MPI.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE",
}
_ABORT_S = 10  # how long an abort may take
_MESSAGE_TAG = 32767  # the largest that every MPI has
_NUM_TAGS = 32767  # those below it


class MpiRequest:
    """An MPI request that holds what it works on until it is complete."""

    def __init__(self, request: MPI.Request, *held: object) -> None:
        self._request: MPI.Request | None = request
        self._held = held

    def test(self) -> bool:
        """Poll MPI once; True when complete."""
        if self._request is None:
            return True
        if not self._request.Test():
            return False
        self._request, self._held = None, ()
        return True


class MpiCollectives:
    """``Collectives`` on one communicator."""

    def __init__(self, comm: MPI.Comm) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._comm = comm
        self._num_started = 0
        self._scratch = Scratch()
        self._traffic = Traffic()  # shared with all duplicates: they use the same wires

    @property
    def rank(self) -> int:
        """This process's index."""
        return int(self._comm.rank)

    @property
    def size(self) -> int:
        """World size."""
        return int(self._comm.size)

    @property
    def host(self) -> str:
        """The name of this rank's host."""
        return MPI.Get_processor_name()

    def start_reduce_scatter(
        self, buffer: Buffer, algorithm: ReduceScatter, *, wire_dtype: WireDtype | None = None
    ) -> Request:
        """Sum ``buffer`` over the ranks into this rank's shard of it."""
        if buffer.numel() % self.size:
            raise CommError(
                f"reduce-scatter of {buffer.numel()} elements over {self.size} ranks: "
                "the length must be a multiple of the world size"
            )
        if self.size == 1:
            return Completed()
        carrier = carrier_of(buffer, wire_dtype)
        if algorithm == "ring":
            return self._start_ring(buffer, carrier)
        if algorithm == "native":
            return self._start_native(buffer, carrier)
        return self._start_exchange(buffer, carrier)

    def start_all_gather(
        self,
        buffer: Buffer,
        algorithm: AllGather = "native",
        *,
        wire_dtype: WireDtype | None = None,
    ) -> Request:
        """Fill ``buffer`` with every rank's shard of it, in place."""
        carrier = carrier_of(buffer, wire_dtype) if self.size > 1 else buffer
        sent = buffer
        if carrier is not buffer:
            sent = self._scratch.take(carrier, buffer.numel())
            self._own_shard(sent).copy_(self._own_shard(buffer))
        request = self._start_gather(sent, algorithm)
        if sent is buffer:
            return request
        # The own shard too, so that all ranks hold the same.
        return ScratchRequest(
            self._scratch, request, held=[sent], finish=partial(_copy, sent, into=buffer)
        )

    def start_all_reduce(self, buffer: Buffer, op: ReduceOp) -> Request:
        """Reduce ``buffer`` over the ranks, in place."""
        request = self._comm.Iallreduce(MPI.IN_PLACE, _spec(buffer), _OPS[op])
        return MpiRequest(request, buffer)

    def start_broadcast(self, buffer: Buffer, root: int) -> Request:
        """Copy ``buffer`` of ``root`` to every rank."""
        return MpiRequest(self._comm.Ibcast(_spec(buffer, moved=True), root), buffer)

    def start_duplicate(self) -> tuple[MpiCollectives, Request]:
        """A duplicated communicator, usable once the request is complete."""
        comm, request = self._comm.Idup()
        # The error handler is inherited; setting it again must wait for the request.
        twin = MpiCollectives.__new__(MpiCollectives)
        twin._comm, twin._num_started, twin._scratch = comm, 0, Scratch()
        twin._traffic = self._traffic
        return twin, MpiRequest(request, comm)

    def free(self) -> None:
        """Give a duplicated communicator back; nothing may be under way on it."""
        self._comm.Free()

    def start_message(self, data: bytes, destination: int) -> Request:
        """Send a short message to one rank, outside of all collectives."""
        request = self._comm.Isend([data, len(data), MPI.BYTE], destination, _MESSAGE_TAG)
        return MpiRequest(request, data)

    def receive_message(self) -> tuple[int, bytes] | None:
        """The next such message that has arrived, with its sender."""
        status = MPI.Status()
        message = self._comm.Improbe(MPI.ANY_SOURCE, _MESSAGE_TAG, status)
        if message is None:
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([data, len(data), MPI.BYTE])
        return status.source, bytes(data)

    def abort(self, code: int) -> None:
        """End the whole job; this process in any case, after a while."""
        if threading.current_thread() is threading.main_thread():
            # MPI waits for the launcher, for ever where that is cut off, and holds the
            # interpreter's lock meanwhile: only the system can end the process then.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_ABORT_S)
        self._comm.Abort(code)

    def start_send(self, buffer: Buffer, destination: int, tag: int) -> Request:
        """Send ``buffer`` to one rank."""
        return MpiRequest(self._comm.Isend(_spec(buffer, moved=True), destination, tag), buffer)

    def start_receive(self, buffer: Buffer, source: int, tag: int) -> Request:
        """Receive into ``buffer`` from one rank."""
        return MpiRequest(self._comm.Irecv(_spec(buffer, moved=True), source, tag), buffer)

    def _start_gather(self, buffer: Buffer, algorithm: AllGather) -> Request:
        if algorithm == "ring" and self.size > 1:
            return RingAllGather(self._next_way(), buffer)
        spec = _spec(buffer, buffer.numel() // self.size, moved=True)
        return MpiRequest(self._comm.Iallgather(MPI.IN_PLACE, spec), buffer)

    def _next_way(self) -> Way:
        """Where the next ring runs, under a tag of its own."""
        self._num_started += 1
        tag = self._num_started % _NUM_TAGS
        return Way(self, rank=self.rank, size=self.size, tag=tag, traffic=self._traffic)

    def _start_ring(self, buffer: Buffer, carrier: Buffer) -> Request:
        shard_numel, width = buffer.numel() // self.size, carrier.element_size()
        # A power of two, so that buckets of all sizes share what lies on the free list.
        numel = min(1 << shard_numel.bit_length(), CHUNK_BYTES // width)
        num = num_receives(shard_numel, width, self.size)
        scratch = [self._scratch.take(carrier, numel) for _ in range(num)]
        outgoing = []
        if carrier is not buffer:
            outgoing = [self._scratch.take(carrier, numel) for _ in range(num)]
        ring = RingReduceScatter(self._next_way(), buffer, scratch=scratch, outgoing=outgoing)
        return ScratchRequest(self._scratch, ring, held=[*scratch, *outgoing])

    def _start_native(self, buffer: Buffer, carrier: Buffer) -> Request:
        dtype = _name(carrier)
        if dtype not in _ARITHMETIC:
            raise ConfigError(
                f"reduce_scatter is 'native', but MPI cannot add {dtype}; use 'exchange' (fp32 "
                "sums) or 'ring'"
            )
        count = buffer.numel() // self.size
        total = self._scratch.take(buffer, count)
        request = MpiRequest(
            self._comm.Ireduce_scatter_block(_spec(buffer, count), _spec(total, count), MPI.SUM),
            buffer,
            total,
        )
        finish = partial(_copy, total, into=self._own_shard(buffer))
        return ScratchRequest(self._scratch, request, held=[total], finish=finish)

    def _start_exchange(self, buffer: Buffer, carrier: Buffer) -> Request:
        count, sent = buffer.numel() // self.size, buffer
        arrived = self._scratch.take(carrier, buffer.numel())
        held = [arrived]
        if carrier is not buffer:
            sent = self._scratch.take(carrier, buffer.numel())
            _copy(buffer, into=sent)
            held.append(sent)
        request = self._comm.Ialltoall(
            _spec(sent, count, moved=True), _spec(arrived, count, moved=True)
        )
        parts = [arrived[i * count : (i + 1) * count] for i in range(self.size)]
        finish = partial(add_in_order, parts, into=self._own_shard(buffer))
        return ScratchRequest(
            self._scratch, MpiRequest(request, sent, arrived), held=held, finish=finish
        )

    def _own_shard(self, buffer: Buffer) -> Any:
        """The slice of ``buffer`` that belongs to this rank."""
        count = buffer.numel() // self.size
        return buffer[self.rank * count : (self.rank + 1) * count]


def connect() -> MpiCollectives:
    """Initialise MPI, asking for MPI_THREAD_MULTIPLE, and duplicate its world communicator.

    Waits for all ranks without the interpreter's lock, so that other threads can act.
    """
    initialize()
    return MpiCollectives(MPI.COMM_WORLD.Dup())


def initialize() -> None:
    """Initialise MPI as ``mpi4py.rc`` asks; nothing if that is done.

    Raises RuntimeError if MPI fails.
    """
    if MPI.Is_initialized():
        return
    level = str(mpi4py.rc.thread_level).upper() if mpi4py.rc.threads else "SINGLE"
    asked, provided = getattr(MPI, f"THREAD_{level}"), ctypes.c_int()
    code = ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, asked, ctypes.byref(provided))
    if code:
        raise RuntimeError(f"MPI_Init_thread failed with code {code}")
    for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
        comm.Set_errhandler(MPI.ERRORS_RETURN)


def finalize() -> None:
    """End MPI, waiting for all ranks without the interpreter's lock, so that other threads can act.

    Does nothing where mpi4py was told not to (``mpi4py.rc.finalize = False``), or MPI has ended.
    Raises CommError if MPI fails.
    """
    if mpi4py.rc.finalize is False or MPI.Is_finalized():
        return
    # mpi4py's own call would hold the lock, and comes too late for any thread of Python's.
    code = ctypes.CDLL(MPI.__file__).MPI_Finalize()
    if code:
        raise CommError(f"MPI_Finalize failed with code {code}")


def supports_threads() -> bool:
    """Whether a thread beside the main one may call MPI."""
    initialize()
    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def claims_cuda() -> bool:
    """Whether the library says that it takes CUDA memory; False for one that cannot be asked."""
    initialize()
    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return query is not None and bool(query())


def describe() -> str:
    """The MPI library and mpi4py, in one line."""
    library = MPI.Get_library_version().split("\n")[0].strip()
    return f"{' '.join(library.split())}, mpi4py {mpi4py.__version__}"


def library() -> Library:
    """The MPI library that this process is connected to."""
    initialize()
    name, numbers = MPI.get_vendor()
    lines = (line.partition(":") for line in MPI.Get_library_version().splitlines())
    variant = Path(MPI.__file__).name.split(".")[1]
    return Library(
        name=name,
        version=".".join(map(str, numbers)),
        mpi4py=mpi4py.__version__,
        abi=variant if variant in ("mpich", "openmpi") else "its own",
        thread_level=_THREAD_LEVELS[MPI.Query_thread()],
        device=next((said.strip() for key, _, said in lines if key.endswith("Device")), ""),
    )


def _copy(source: Any, *, into: Any) -> None:
    into.copy_(source)


def _name(buffer: Buffer) -> str:
    return str(buffer.dtype).removeprefix("torch.")


def _spec(buffer: Buffer, count: int | None = None, *, moved: bool = False) -> list[Any]:
    """What mpi4py takes for ``buffer``: memory, count and datatype."""
    width = buffer.element_size()
    memory = MPI.memory.fromaddress(buffer.data_ptr(), buffer.numel() * width)
    datatype = _BY_WIDTH[width] if moved else _ARITHMETIC[_name(buffer)]
    return [memory, buffer.numel() if count is None else count, datatype]
