"""Later: an operation that has its place in line, but lets others go first."""

from __future__ import annotations

from collections.abc import Callable

from dearmpi.comm.api.collectives import Movement, Request


class Later(Request):
    """What ``start`` posts, once ``may_begin()``; until then nothing."""

    def __init__(self, may_begin: Callable[[], bool], start: Callable[[], Request]) -> None:
        self._may_begin, self._start = may_begin, start
        self._request: Request | None = None

    @property
    def movement(self) -> Movement:
        """As the operation's own."""
        return Movement.NONE if self._request is None else self._request.movement

    def test(self) -> bool:
        """Make progress; True once the operation is complete."""
        if self._request is None and self._may_begin():
            self._request = self._start()
        return self._request is not None and self._request.test()
