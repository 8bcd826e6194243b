"""SendScheduler: what this rank's rings have on the wire, and which of them may send next.

Messages from one rank to another leave in the order in which they were handed over. A small bucket
for which the next layer waits would queue behind all that large ones have handed over before. So no
more is handed over than keeps the wire busy, and what is urgent goes first.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

# At 10 Gbit/s what leaves in 1.7 ms, at least as long as polls lie apart. On links of more than
# some 20 Gbit/s the wire runs dry between polls once nothing has begun or ended for 20 ms.
MOST_BYTES = 2 << 20


class Priority(IntEnum):
    """Which operations yield to which, the least urgent first.

    While both are under way all-gathers fill gaps: what is left of the reduce-scatters must be
    over before the all-gather that the first layer waits for can begin.
    """

    ALL_GATHER = 0
    REDUCE_SCATTER = 1


class RingOperation(Protocol):
    """A ring under way, which sends as many messages as it receives."""

    @property
    def priority(self) -> Priority: ...

    @property
    def bytes_out(self) -> int:
        """Bytes sent, less those that have come in: as all ranks of a ring move at one pace,
        about what its successor has yet to receive.
        """
        ...


class SendScheduler:
    """The rings that still send on this rank: the most urgent first, then in order of start."""

    def __init__(self) -> None:
        self._operations: list[RingOperation] = []

    def enter(self, operation: RingOperation) -> None:
        """``operation`` will ask from now on."""
        place = len(self._operations)
        while place and self._operations[place - 1].priority < operation.priority:
            place -= 1
        self._operations.insert(place, operation)

    def leave(self, operation: RingOperation) -> None:
        """``operation`` has sent everything."""
        self._operations = [other for other in self._operations if other is not operation]

    def admits(self, operation: RingOperation) -> bool:
        """Whether ``operation`` may send its next message.

        It may if nothing of its own is under way: ranks may disagree for a while on what is urgent,
        and each ring must move on by itself. Otherwise it waits while ``MOST_BYTES`` of what is as
        urgent, or more, are under way.
        """
        if not operation.bytes_out:
            return True
        ahead = 0
        for other in self._operations:
            ahead += other.bytes_out
            if other is operation:
                break
        return ahead < MOST_BYTES
