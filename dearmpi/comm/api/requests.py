"""Requests made of other requests: one after the other, or all at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dearmpi.comm.api.collectives import Buffer, Collectives, Movement, PointToPoint, Request
from dearmpi.errors import CommError


class Chain(Request):
    """The requests of ``steps``, each posted once the one before is complete.

    Posts the first at once. A test advances by one step at most, so that the computation between
    two steps does not delay other operations for long.
    """

    def __init__(self, steps: Iterator[Request]) -> None:
        self._steps = steps
        self._step: Request | None = None
        self._moved = False
        self._begin_next()

    @property
    def movement(self) -> Movement:
        """That of the current step; ``OPERATION`` where the last test has begun a step."""
        if self._moved or self._step is None:
            return Movement.OPERATION
        return self._step.movement

    def test(self) -> bool:
        """Make progress; True once the last step is complete.

        Raises CommError if an exception such as KeyboardInterrupt has interrupted a step's start.
        """
        if self._is_interrupted:
            raise CommError(
                "it was interrupted between two of its steps, and cannot continue",
                code="communication-interrupted",
            )
        self._moved = self._step is not None and self._step.test()
        if self._moved:
            self._begin_next()
        return self._step is None

    def _begin_next(self) -> None:
        self._is_interrupted = True  # unless the next line comes to its end
        self._step = next(self._steps, None)
        self._is_interrupted = False


_TAG = 1  # on a channel of its own nothing else is under way

Parcel = tuple[int, Buffer]
"""A rank, and the buffer that goes to it or comes from it: 1-D, contiguous, not empty."""


class PeerMessages(Request):
    """Sends and receives of single ranks, all posted at once.

    Messages from one rank to another arrive in the order of sending, so both ranks must list the
    same buffers in the same order.
    """

    def __init__(
        self, collectives: Collectives, *, sends: Sequence[Parcel], receives: Sequence[Parcel]
    ) -> None:
        assert isinstance(collectives, PointToPoint)
        self._requests: list[Request] = [
            *(collectives.start_receive(buffer, rank, _TAG) for rank, buffer in receives),
            *(collectives.start_send(buffer, rank, _TAG) for rank, buffer in sends),
        ]

    def test(self) -> bool:
        self._requests = [request for request in self._requests if not request.test()]
        return not self._requests
