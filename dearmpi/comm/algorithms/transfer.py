"""Transfer: buffers that go from single ranks to single ranks, all at once."""

from __future__ import annotations

from collections.abc import Sequence

from dearmpi.comm.algorithms.algorithm import PointToPoint
from dearmpi.comm.api.collectives import Buffer, Collectives, Request

_TAG = 1  # on a channel of its own nothing else is under way

Parcel = tuple[int, Buffer]
"""A rank, and what goes to it or comes from it: 1-D, contiguous, not empty."""


class Transfer(Request):
    """A request that is complete once all of ``sends`` have left and all of ``receives`` are here.

    What one rank sends another arrives in the order of sending, so both must list the same buffers
    in the same order.
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
        """Poll what is still under way; True once nothing is."""
        self._requests = [request for request in self._requests if not request.test()]
        return not self._requests
