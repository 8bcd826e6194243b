"""Library: which MPI this process runs on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Library:
    """The MPI library in use.

    abi: ``mpich`` or ``openmpi`` where mpi4py chose at import between the two; else that of the
        library it was built with. thread_level: such as ``MPI_THREAD_MULTIPLE``. device: what the
        library says of its transports, or empty.
    """

    name: str
    version: str
    mpi4py: str
    abi: str
    thread_level: str
    device: str = ""
