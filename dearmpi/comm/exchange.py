"""Exchange: what each collective call on the world sends, as steps of a ``Chain``.

All begin with ``meet``, so that ranks in different calls find out before they use any content.
What fits its message needs no other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dearmpi.comm.api import Collectives, ReduceOp, Request
from dearmpi.comm.call import INLINE_BYTES, Call, meet
from dearmpi.comm.host import HostBuffer
from dearmpi.comm.texts import gather_rows

Result_co = TypeVar("Result_co", covariant=True)
Values = npt.NDArray[np.float64]

_REDUCTIONS: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class Steps(Protocol[Result_co]):
    """What a call does on its collectives, operation by operation."""

    def __call__(
        self, collectives: Collectives, call: Call, /
    ) -> Generator[Request, None, Result_co]: ...


def reduce_values(
    collectives: Collectives, call: Call, /, *, values: Values, op: ReduceOp
) -> Generator[Request, None, Values]:
    """``values`` reduced over the ranks. Few are reduced in rank order, so alike on all ranks."""
    contents = yield from meet(collectives, call, values.tobytes())
    if values.nbytes <= INLINE_BYTES:
        rows = [np.frombuffer(content.data, np.float64) for content in contents]
        # One by one: a sum over an array may be formed in another order elsewhere.
        reduced: Values = _REDUCTIONS[op].accumulate(np.stack(rows), axis=0)[-1]
        return reduced
    buffer = HostBuffer(values.copy())
    yield collectives.start_all_reduce(buffer, op)
    whole: Values = buffer.array
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
