"""Collective calls: what each call on the world sends, as steps of a ``Chain``.

All calls begin with ``meet``, whose message holds a digest of the call and its content. Ranks in
different calls find out before they use any content. The message has the same size for every call,
so that no two calls can mix. Content that fits the message needs no other.

Also how messages name ranks, and where texts of ranks differ.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dearmpi.comm.api.call import Call, cure_for, name_ranks
from dearmpi.comm.api.collectives import Collectives, ReduceOp, Request
from dearmpi.comm.messages.values import HostBuffer, decode, encode
from dearmpi.errors import MismatchError

Result_co = TypeVar("Result_co", covariant=True)
Values = npt.NDArray[np.float64]

_HEADER = struct.Struct("<8sq")  # digest of the call, bytes of content
INLINE_BYTES = 112
"""Bytes of content that fit the first message."""
_ROW_BYTES = _HEADER.size + INLINE_BYTES

_REDUCTIONS: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class Steps(Protocol[Result_co]):
    """What a call does on its collectives, operation by operation."""

    def __call__(
        self, collectives: Collectives, call: Call, /
    ) -> Generator[Request, None, Result_co]: ...


@dataclass(frozen=True, slots=True)
class Content:
    """What one rank has sent; ``data`` holds all ``num_bytes`` of it if they fit the message."""

    data: bytes
    num_bytes: int


def meet(
    collectives: Collectives, call: Call, content: bytes = b""
) -> Generator[Request, None, list[Content]]:
    """Every rank's content by rank, once all are known to be in the same call.

    Raises MismatchError, on every rank, if they are not.
    """
    rows = np.zeros((collectives.size, _ROW_BYTES), np.uint8)
    row = _HEADER.pack(call.digest, len(content)) + content[:INLINE_BYTES]
    rows[collectives.rank, : len(row)] = np.frombuffer(row, np.uint8)
    yield collectives.start_all_gather(HostBuffer(rows.reshape(-1)))
    headers = [_HEADER.unpack(row[: _HEADER.size].tobytes()) for row in rows]
    if len({digest for digest, _ in headers}) > 1:
        described = yield from gather_texts(collectives, call.describe())
        ranks = call.job_ranks or range(collectives.size)
        raise MismatchError(
            _explain(described, dict(zip(ranks, collectives.hosts, strict=True))),
            code="ranks-in-different-calls",
        )
    return [
        Content(row[_HEADER.size :].tobytes()[:num_bytes], num_bytes)
        for row, (_, num_bytes) in zip(rows, headers, strict=True)
    ]


def reduce_values(
    collectives: Collectives, call: Call, /, *, values: Values, op: ReduceOp
) -> Generator[Request, None, Values]:
    """``values`` reduced over the ranks. Few are reduced in rank order, so alike on all ranks.

    What is NaN on any rank is NaN in the result.
    """
    is_short = values.nbytes <= INLINE_BYTES
    no_number = np.isnan(values)
    own = values.tobytes() if is_short else bytes([bool(no_number.any())])
    contents = yield from meet(collectives, call, own)
    if is_short:
        rows = [np.frombuffer(content.data, np.float64) for content in contents]
        # One by one: numpy may form a sum over an array in another order on another machine.
        with np.errstate(all="ignore"):  # infinity and NaN are results like others
            reduced: Values = _REDUCTIONS[op].accumulate(np.stack(rows), axis=0)[-1]
        return reduced
    buffer = HostBuffer(values.copy())
    yield collectives.start_all_reduce(buffer, op)
    whole: Values = buffer.array
    if op != "sum" and any(content.data == b"\1" for content in contents):
        # MPI's max and min pass over NaN or not, and so may differ from rank to rank.
        places = HostBuffer(no_number.astype(np.float64))
        yield collectives.start_all_reduce(places, "max")
        whole[places.array > 0] = np.nan
    return whole


def gather_bytes(
    collectives: Collectives, call: Call, /, *, data: bytes
) -> Generator[Request, None, list[bytes]]:
    """Every rank's ``data``, by rank."""
    contents = yield from meet(collectives, call, data)
    lengths = [content.num_bytes for content in contents]
    if max(lengths) <= INLINE_BYTES:
        return [content.data for content in contents]
    return (yield from gather_rows(collectives, data, lengths))


def broadcast_bytes(
    collectives: Collectives, call: Call, /, *, data: bytes, root: int
) -> Generator[Request, None, bytes]:
    """The ``data`` of ``root``; the others' is ignored."""
    own = data if collectives.rank == root else b""
    sent = (yield from meet(collectives, call, own))[root]
    if sent.num_bytes <= INLINE_BYTES:
        return sent.data
    buffer = HostBuffer(np.frombuffer(own.ljust(sent.num_bytes, b"\0"), np.uint8).copy())
    yield collectives.start_broadcast(buffer, root)
    return buffer.array.tobytes()


def run_alike(
    collectives: Collectives, call: Call, /, *, start: Callable[[Collectives], Request]
) -> Generator[Request, None, None]:
    """The operation that ``start`` begins, once all ranks are known to begin it."""
    yield from meet(collectives, call)
    yield start(collectives)


def duplicate(collectives: Collectives, call: Call, /) -> Generator[Request, None, Any]:
    """Collectives over the same ranks with an order of their own."""
    yield from meet(collectives, call)
    twin, request = collectives.start_duplicate()
    yield request
    return twin


def gather_texts(collectives: Collectives, text: str) -> Generator[Request, None, list[str]]:
    """Every rank's ``text``, by rank."""
    rows = yield from gather_data(collectives, encode(text))
    return [decode(row) for row in rows]


def gather_data(collectives: Collectives, data: bytes) -> Generator[Request, None, list[bytes]]:
    """Every rank's ``data``, by rank."""
    lengths = np.zeros(collectives.size, dtype=np.int64)
    lengths[collectives.rank] = len(data)
    yield collectives.start_all_gather(HostBuffer(lengths))
    return (yield from gather_rows(collectives, data, [int(length) for length in lengths]))


def gather_rows(
    collectives: Collectives, data: bytes, lengths: list[int]
) -> Generator[Request, None, list[bytes]]:
    """Every rank's ``data``, by rank, of which all ranks know the ``lengths``."""
    rows = np.zeros((collectives.size, max(lengths)), dtype=np.uint8)
    rows[collectives.rank, : len(data)] = np.frombuffer(data, dtype=np.uint8)
    if rows.size:
        yield collectives.start_all_gather(HostBuffer(rows.reshape(-1)))
    return [bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def _explain(described: Sequence[str], hosts: Mapping[int, str]) -> str:
    """hosts: by rank of the job, in the order of the calls ``described``."""
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, call in zip(hosts, described, strict=True):
        alike[call].append(rank)
    calls = "; ".join(f"{name_ranks(ranks, hosts)}: {call}" for call, ranks in alike.items())
    return f"the ranks are in different collective calls: {calls}. Cure: {cure_for(*alike)}"


_NUM_DIGITS = 12

Gather = Callable[[str], Sequence[str]]
"""Gives every rank's text, by rank, to all of them (collective)."""


def digest(lines: Sequence[str]) -> str:
    """A short hash of ``lines``."""
    return hashlib.sha256(json.dumps(list(lines)).encode()).hexdigest()[:_NUM_DIGITS]


def first_difference(lines: Sequence[str], gather: Gather) -> list[str]:
    """Every rank's line, by rank, at the first place where ranks differ (collective).

    The line is ``nothing further`` on ranks whose lines have ended. Empty if all are the same.
    Bisection over hashes finds the place, so that only hashes and one line of each rank travel.
    """

    def is_alike(num_lines: int) -> bool:
        return len(set(gather(digest(lines[:num_lines])))) == 1

    same, differs = 0, max(int(num) for num in gather(str(len(lines))))
    if is_alike(differs):
        return []
    while differs - same > 1:
        middle = (same + differs) // 2
        if is_alike(middle):
            same = middle
        else:
            differs = middle
    return list(gather(lines[same] if same < len(lines) else "nothing further"))
