"""Send scheduler: what this rank's rings have on the wire, and which of them may send next.

Messages from one rank to another leave in the order in which MPI gets them. A small bucket for
which the next layer waits would queue behind all messages of large buckets. So MPI gets no more
than keeps the wire busy, and operations of higher priority send first.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

# 1.7 ms of a link of 10 Gbit/s, no less than the time between polls. Beyond some 20 Gbit/s the wire
# runs dry between polls once no operation has begun or ended for 20 ms.
MOST_BYTES = 2 << 20


class Priority(IntEnum):
    """Operations of lower priority yield to higher ones.

    All-gathers fill the gaps of reduce-scatters: all reduce-scatters must end before the all-gather
    that the first layer waits for can begin.
    """

    ALL_GATHER = 0
    REDUCE_SCATTER = 1


class RingOperation(Protocol):
    """A ring in flight, which sends as many messages as it receives."""

    @property
    def priority(self) -> Priority: ...

    @property
    def bytes_out(self) -> int:
        """Bytes sent less bytes received.

        All ranks of a ring move at one pace, so the successor has about this to receive yet.
        """
        ...


class SendScheduler:
    """The rings that still send on this rank, by priority and then in order of start."""

    def __init__(self) -> None:
        self._operations: list[RingOperation] = []

    def enter(self, operation: RingOperation) -> None:
        """Take ``operation``, which calls ``admits`` from now on."""
        place = len(self._operations)
        while place and self._operations[place - 1].priority < operation.priority:
            place -= 1
        self._operations.insert(place, operation)

    def leave(self, operation: RingOperation) -> None:
        """Drop ``operation``, which has sent everything."""
        self._operations = [other for other in self._operations if other is not operation]

    def admits(self, operation: RingOperation) -> bool:
        """Whether ``operation`` may send its next message.

        It may if it has nothing in flight: ranks may order their rings differently for a while,
        and each ring must move on by itself. Otherwise it waits while ``MOST_BYTES`` of operations
        up to its own place are in flight.
        """
        if not operation.bytes_out:
            return True
        ahead = 0
        for other in self._operations:
            ahead += other.bytes_out
            if other is operation:
                break
        return ahead < MOST_BYTES
