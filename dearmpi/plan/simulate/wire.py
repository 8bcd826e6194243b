"""Wire: messages one after the other, reduce-scatters before all-gathers.

A collective goes in rounds: in each, a rank sends a message to its neighbour and waits for the one
that comes from the other side. Two ranks share one connection, or one link, and what is sent over
it arrives in order. So a message stands in line behind those of its kind that are on their way
already: a small reduce-scatter beside a large one waits for the large one's message, in every round
unless it gets through its own while the large one pauses. A wire shared in equal parts would let
the small one through in next to no time. (The engine sends chunks, and hands over 2 MiB of them at
most, ``comm/algorithms/send_scheduler.py``. Beside buckets of more than 2 MiB for each rank it
waits less than here.)

Reduce-scatters pass all-gathers (``comm/algorithms/send_scheduler.py``): what is left of a gather's
message goes on after them. The engine hands so little over ahead of time that what it cannot take
back is left out.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

MOST_ROUNDS = 4  # simulated; with more, messages are smaller and the sum of waits is the same


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective: seconds if alone, for how long it needs the whole wire, and its rounds."""

    alone_s: float
    wire_s: float
    num_rounds: int = 1


class Flight:
    """A transfer under way, with the ``bucket`` that it carries."""

    __slots__ = (
        "bucket",
        "left",
        "message_left_s",
        "message_s",
        "pause_s",
        "reduces",
        "start_s",
        "until_s",
    )

    def __init__(self, bucket: int, transfer: Transfer, *, reduces: bool, now: float) -> None:
        self.bucket, self.reduces, self.start_s = bucket, reduces, now
        self.left = transfer.num_rounds
        self.message_s = self.message_left_s = transfer.wire_s / self.left
        self.pause_s = max(0.0, transfer.alone_s - transfer.wire_s) / self.left
        self.until_s = now  # end of the message on the wire, or of the pause after it


class Wire:
    """What is in flight: one message on the wire, others in line, and transfers in a pause."""

    def __init__(self) -> None:
        self._line: deque[Flight] = deque()
        self._pausing: list[Flight] = []

    def __len__(self) -> int:
        return len(self._line) + len(self._pausing)

    def post(self, flight: Flight, now: float) -> None:
        """Put the next message of ``flight`` in line."""
        if flight.message_s == 0:  # what takes no time on the wire waits for nothing before it
            flight.until_s = now + flight.pause_s
            self._pausing.append(flight)
            return
        line, place = self._line, len(self._line)
        while flight.reduces and place and not line[place - 1].reduces:
            place -= 1
        flight.message_left_s = flight.message_s
        if place == 0:
            if line:
                line[0].message_left_s = line[0].until_s - now
            flight.until_s = now + flight.message_s
        line.insert(place, flight)

    def advance(self, limit_s: float) -> tuple[float, list[Flight]]:
        """Let time pass until something is complete, to ``limit_s`` at most: until when, and what.

        Infinite, and nothing, if nothing is in flight and there is no limit.
        """
        line, pausing = self._line, self._pausing
        while True:
            now = line[0].until_s if line else math.inf
            for flight in pausing:
                if flight.until_s < now:
                    now = flight.until_s
            if now > limit_s or now == math.inf:
                return limit_s, []
            if line and line[0].until_s <= now:
                sent = line.popleft()
                sent.until_s = now + sent.pause_s
                pausing.append(sent)
                if line:
                    line[0].until_s = now + line[0].message_left_s
            if landed := self._end_pauses(now):
                return now, landed

    def _end_pauses(self, now: float) -> list[Flight]:
        """Send the next messages; what had its last is complete."""
        landed = []
        for flight in [one for one in self._pausing if one.until_s <= now]:
            self._pausing.remove(flight)
            flight.left -= 1
            if flight.left:
                self.post(flight, now)
            else:
                landed.append(flight)
        return landed
