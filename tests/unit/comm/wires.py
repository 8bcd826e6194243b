"""Wires between ranks that a test polls itself: bytes move when it lets them."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from dearmpi.comm.algorithms.algorithm import SendScheduler
from dearmpi.comm.algorithms.ring import RingContext
from dearmpi.comm.api.collectives import Request
from dearmpi.cuts import even_cuts


class Post(Request):
    """A send or a receive; ``done`` once the bytes have moved."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.done = False

    def test(self) -> bool:
        return self.done


class Wires:
    """Sends and receives of all ranks; bytes move when the test lets them, as late as it likes.

    What is sent is read at the latest moment, and what is received is written at the latest.
    """

    def __init__(self) -> None:
        self.sends: defaultdict[tuple[int, int, int], deque[Post]] = defaultdict(deque)
        self.receives: defaultdict[tuple[int, int, int], deque[Post]] = defaultdict(deque)

    def deliver_one(self, chance: random.Random) -> bool:
        """Move one message, chosen at random; those of one sender to one receiver keep order."""
        ready = [key for key, sends in self.sends.items() if sends and self.receives[key]]
        if not ready:
            return False
        key = chance.choice(sorted(ready))
        send, receive = self.sends[key].popleft(), self.receives[key].popleft()
        receive.buffer.copy_(send.buffer)
        send.done = receive.done = True
        return True


class End:
    """One rank's access to the wires."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self.wires, self.rank = wires, rank

    def start_send(self, buffer: Any, destination: int, tag: int) -> Post:
        post = Post(buffer)
        self.wires.sends[self.rank, destination, tag].append(post)
        return post

    def start_receive(self, buffer: Any, source: int, tag: int) -> Post:
        post = Post(buffer)
        self.wires.receives[source, self.rank, tag].append(post)
        return post


def context(
    end: End,
    size: int,
    tag: int = 1,
    scheduler: SendScheduler | None = None,
    order: Sequence[int] | None = None,
) -> RingContext:
    """``order``: as ranks follow each other; by default that of their numbers."""
    ranks = tuple(range(size) if order is None else order)
    return RingContext(
        end, ranks, ranks.index(end.rank), tag=tag, scheduler=scheduler or SendScheduler()
    )


def run(wires: Wires, rings: Sequence[Request], chance: random.Random) -> None:
    """Deliver and poll in random order until all rings are complete."""
    left = list(rings)
    for _ in range(2000 * len(rings) ** 2):  # far more turns than all rounds of all rings take
        wires.deliver_one(chance)
        one = chance.choice(left)
        if chance.random() < 0.7 and one.test():
            left.remove(one)
        if not left:
            return
    raise AssertionError(f"{len(left)} of {len(rings)} rings never completed")


def shard(buffer: Any, rank: int, size: int) -> Any:
    return buffer[even_cuts(buffer.numel(), size).slice_of(rank)]
