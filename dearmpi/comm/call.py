"""Call: what a collective call is, which its first message tells along with its content.

Ranks that are in different calls find out in that message, before any content is used. The first
message has one size and one kind, whatever the call, so that no two calls can mix.
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from dearmpi.comm.api import Collectives, Request
from dearmpi.comm.crowd import name_ranks
from dearmpi.comm.host import HostBuffer
from dearmpi.comm.stack import stack_of
from dearmpi.comm.texts import gather_texts
from dearmpi.errors import MismatchError

_HEADER = struct.Struct("<8sq")  # digest of the call, bytes of content
INLINE_BYTES = 112
"""Content of at most so many bytes travels in the first message."""
_ROW_BYTES = _HEADER.size + INLINE_BYTES

_CURES = {
    "state_dict": "call state_dict() on every rank, and write the file on rank 0",
    "clip_grad_norm_": "call clip_grad_norm_() on every rank, and log the norm on rank 0",
}
_CURE = "make the same collective calls on every rank, in the same order, with as many values"


def cure_for(*calls: str) -> str:
    """What to do where not all ranks are in the same one of ``calls``."""
    return next((_CURES[key] for call in calls for key in _CURES if key in call), _CURE)


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's collective call.

    name: what the script has called, such as ``optimizer.state_dict()``.
    operation: what is exchanged; ranks must agree on both.
    thread: which waits for it, and so shows the place of the call.
    """

    name: str
    operation: str
    thread: int

    def __str__(self) -> str:
        return self.name if self.name == self.operation else f"{self.name} ({self.operation})"

    @property
    def digest(self) -> bytes:
        """Eight bytes that stand for the call."""
        return hashlib.blake2b(str(self).encode(), digest_size=8).digest()

    def describe(self) -> str:
        """The call with its place in the script."""
        stack = stack_of(self.thread)
        place = stack[-1].rpartition(" ")[0] if stack else "an unknown place"
        return f"{self}, called at {place}"


@dataclass(frozen=True, slots=True)
class Content:
    """What one rank has sent: ``data`` has all ``num_bytes`` of it if these fit the message."""

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
        raise MismatchError(_explain(described, collectives.hosts))
    return [
        Content(row[_HEADER.size :].tobytes()[:num_bytes], num_bytes)
        for row, (_, num_bytes) in zip(rows, headers, strict=True)
    ]


def _explain(described: Sequence[str], hosts: Sequence[str]) -> str:
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, call in enumerate(described):
        alike[call].append(rank)
    calls = "; ".join(f"{name_ranks(ranks, hosts)}: {call}" for call, ranks in alike.items())
    return f"the ranks are in different collective calls: {calls}. To mend it, {cure_for(*alike)}"
