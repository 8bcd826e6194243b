"""Texts and bytes that ranks tell each other, as steps of a ``Chain`` that returns them."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from dearmpi.comm.api.collectives import Collectives, Request
from dearmpi.comm.messages.host import HostBuffer

_ERRORS = "surrogatepass"  # file names may hold lone surrogates


def encode(text: str) -> bytes:
    """``text`` as bytes, whatever it holds."""
    return text.encode(errors=_ERRORS)


def decode(data: bytes) -> str:
    """What ``encode`` was given."""
    return data.decode(errors=_ERRORS)


def gather_texts(collectives: Collectives, text: str) -> Generator[Request, None, list[str]]:
    """Every rank's ``text``, by rank."""
    data = encode(text)
    lengths = np.zeros(collectives.size, dtype=np.int64)
    lengths[collectives.rank] = len(data)
    yield collectives.start_all_gather(HostBuffer(lengths))
    rows = yield from gather_rows(collectives, data, [int(length) for length in lengths])
    return [decode(row) for row in rows]


def gather_rows(
    collectives: Collectives, data: bytes, lengths: list[int]
) -> Generator[Request, None, list[bytes]]:
    """Every rank's ``data``, by rank, of which all ranks know the ``lengths``."""
    rows = np.zeros((collectives.size, max(lengths)), dtype=np.uint8)
    rows[collectives.rank, : len(data)] = np.frombuffer(data, dtype=np.uint8)
    if rows.size:
        yield collectives.start_all_gather(HostBuffer(rows.reshape(-1)))
    return [bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]
