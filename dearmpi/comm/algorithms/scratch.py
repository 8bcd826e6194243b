"""Scratch: memory that operations in flight reuse, and the dtype in which they send.

Fresh pages cost more than the copies that they serve.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Any

from dearmpi.comm.api.collectives import Buffer, Request, Wrapper
from dearmpi.config import WireDtype

# The methods that make a tensor of each; this package does not import torch.
_CASTS = {"bf16": "bfloat16", "fp16": "half"}
_HALF_BYTES = 2


def carrier_of(buffer: Buffer, wire_dtype: WireDtype | None) -> Any:
    """A buffer of the dtype in which ``buffer`` travels, to make scratch buffers like it.

    ``buffer`` itself if it travels as it is: without ``wire_dtype``, or if it is no wider.
    """
    if sent_size(buffer.element_size(), wire_dtype) == buffer.element_size():
        return buffer
    assert wire_dtype is not None, "all others travel as they are"
    return getattr(buffer.new_empty(0), _CASTS[wire_dtype])()


def sent_size(element_size: int, wire_dtype: WireDtype | None) -> int:
    """Bytes of an element on the wire; ``element_size``: in memory."""
    return element_size if wire_dtype is None else min(element_size, _HALF_BYTES)


def copy(source: Any, *, into: Any) -> None:
    """Overwrite ``into`` with ``source``."""
    into.copy_(source)


def add_in_order(parts: Sequence[Any], *, into: Any) -> None:
    """Overwrite ``into`` with the sum of ``parts``, all of one length.

    Half precision is added in fp32, or in the wider dtype of ``into``, and rounded once.
    """
    is_wide = into.element_size() > _HALF_BYTES
    total = into.copy_(parts[0]) if is_wide else parts[0].float()
    for part in parts[1:]:
        total.add_(part)
    if not is_wide:
        into.copy_(total)


class Scratch:
    """Free buffers, by dtype and device, the shortest first.

    Buckets of different lengths share them. There are never more than were in use at once, and none
    is longer than the longest request.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[Any]] = {}

    def take(self, like: Buffer, numel: int) -> Any:
        """A buffer of ``numel`` elements or more, of the dtype and on the device of ``like``."""
        free = self._free.get(_kind(like), [])
        index = bisect_left(free, numel, key=_length)
        if index < len(free):
            return free.pop(index)
        if free:
            free.pop()  # replaced, so that not every length keeps a buffer
        return like.new_empty(numel)

    def give_back(self, buffer: Any) -> None:
        """Return ``buffer``, which nothing reads or writes any more."""
        insort(self._free.setdefault(_kind(buffer), []), buffer, key=_length)


def _kind(buffer: Buffer) -> tuple[Any, ...]:
    return buffer.dtype, getattr(buffer, "device", None)


def _length(buffer: Buffer) -> int:
    return buffer.numel()


class ScratchRequest(Wrapper):
    """An operation that uses scratch memory, and returns it at its end.

    held: the scratch buffers. finish: runs once ``request`` is complete, and makes the result.
    """

    def __init__(
        self,
        scratch: Scratch,
        request: Request,
        *,
        held: Sequence[Any],
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(request)
        self._scratch, self._held, self._finish = scratch, held, finish
        self._done = False

    def test(self) -> bool:
        if not self._done and self._request.test():
            self._finish()
            for buffer in self._held:
                self._scratch.give_back(buffer)
            self._done = True
        return self._done
