"""Texts that ranks tell each other, as steps of a ``Chain`` whose result is what was told."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from dearmpi.comm.api import Collectives, Request
from dearmpi.comm.host import HostBuffer

_ERRORS = "surrogatepass"  # file names may hold lone surrogates


def gather_texts(collectives: Collectives, text: str) -> Generator[Request, None, list[str]]:
    """Every rank's ``text``, by rank."""
    data = text.encode(errors=_ERRORS)
    longest = HostBuffer(np.array([len(data) + 1.0]))
    yield collectives.start_all_reduce(longest, "max")
    rows = np.zeros((collectives.size, int(longest.array[0])), dtype=np.uint8)
    rows[collectives.rank, : len(data)] = np.frombuffer(data, dtype=np.uint8)
    rows[collectives.rank, len(data)] = 1  # marks the end, so that any text survives
    yield collectives.start_all_gather(HostBuffer(rows.reshape(-1)))
    return [bytes(row).rstrip(b"\0")[:-1].decode(errors=_ERRORS) for row in rows]


def broadcast_text(collectives: Collectives, text: str) -> Generator[Request, None, str]:
    """Rank 0's ``text``; the others' is ignored."""
    data = text.encode(errors=_ERRORS) if collectives.rank == 0 else b""
    longest = HostBuffer(np.array([float(len(data))]))
    yield collectives.start_all_reduce(longest, "max")
    told = HostBuffer(np.frombuffer(data.ljust(int(longest.array[0]), b"\0"), np.uint8).copy())
    if told.numel():
        yield collectives.start_broadcast(told, 0)
    return told.array.tobytes().decode(errors=_ERRORS)
