"""Letters: what fake ranks send each other singly; the nth sent is the nth received."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dearmpi.errors import CommError

Route = tuple[int, int, int, int]
"""Communicator, sender, receiver and tag."""


class Letters:
    """All letters of a hub; the caller holds its lock."""

    def __init__(self) -> None:
        self._sent: dict[tuple[Route, int], Any] = {}
        self._num_sent: Counter[Route] = Counter()
        self._num_awaited: Counter[Route] = Counter()

    def send(self, route: Route, buffer: Any) -> None:
        """Put a copy of ``buffer`` on its way."""
        self._sent[route, self._num_sent[route]] = buffer.clone()
        self._num_sent[route] += 1

    def await_next(self, route: Route) -> int:
        """The number of the letter that the next receive is to have."""
        self._num_awaited[route] += 1
        return self._num_awaited[route] - 1

    def deliver(self, route: Route, number: int, buffer: Any) -> bool:
        """Copy letter ``number`` into ``buffer`` if it is there. Raises CommError if it differs."""
        content = self._sent.get((route, number))
        if content is None:
            return False
        if (content.numel(), content.dtype) != (buffer.numel(), buffer.dtype):
            raise CommError(
                f"rank {route[2]} waits for {buffer.numel()} elements of {buffer.dtype} from rank "
                f"{route[1]}, which sent {content.numel()} of {content.dtype}"
            )
        buffer.copy_(self._sent.pop((route, number)))
        return True
