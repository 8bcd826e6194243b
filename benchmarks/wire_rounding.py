"""How far is a sum off that was sent in half precision, and how does that grow with the ranks?

Runs the ring and the exchange of dearmpi/comm over made-up wires, in one process, on numbers drawn
from a normal distribution, as gradients of independent batches are.

Usage: python benchmarks/wire_rounding.py
Prints, for each dtype and number of ranks, the root mean square of the error over that of the sum,
and in brackets the largest error over its documented bound.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import torch
from torch import Tensor

from dearmpi.comm.algorithms.algorithm import SendScheduler
from dearmpi.comm.algorithms.ring import RingContext, RingReduceScatter, num_receives
from dearmpi.comm.algorithms.scratch import add_in_order
from dearmpi.comm.api.collectives import Request
from dearmpi.cuts import even_cuts

WORLD_SIZES = (2, 4, 8, 16, 64)
SHARD_NUMEL = 500
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Message(Request):
    """A receive that is complete once what was sent has been taken."""

    def __init__(self, queue: deque[Tensor], buffer: Tensor) -> None:
        self._queue, self._buffer, self._done = queue, buffer, False

    def test(self) -> bool:
        if not self._done and self._queue:
            self._buffer.copy_(self._queue.popleft())
            self._done = True
        return self._done


class Sent(Request):
    """A send that was copied at once."""

    def test(self) -> bool:
        return True


class Wires:
    """Sends and receives of one rank; ``queues`` are shared by all."""

    def __init__(self, queues: defaultdict[tuple[int, int], deque[Tensor]], rank: int) -> None:
        self._queues, self._rank = queues, rank

    def start_send(self, buffer: Any, destination: int, tag: int) -> Sent:
        self._queues[self._rank, destination].append(buffer.clone())
        return Sent()

    def start_receive(self, buffer: Any, source: int, tag: int) -> Message:
        return Message(self._queues[source, self._rank], buffer)


def by_ring(terms: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first dimension, each shard as the ring leaves it on its rank."""
    size = len(terms)
    queues: defaultdict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
    num = num_receives(SHARD_NUMEL, dtype.itemsize, size)
    buffers = list(terms.clone())
    rings = [
        RingReduceScatter(
            RingContext(
                Wires(queues, rank), tuple(range(size)), rank, tag=0, scheduler=SendScheduler()
            ),
            buffer,
            even_cuts(buffer.numel(), size),
            scratch=[torch.empty(SHARD_NUMEL, dtype=dtype) for _ in range(num)],
            outgoing=[torch.empty(SHARD_NUMEL, dtype=dtype) for _ in range(num)],
        )
        for rank, buffer in enumerate(buffers)
    ]
    left = rings
    while left:
        left = [ring for ring in left if not ring.test()]
    return torch.cat([buffer.chunk(size)[rank] for rank, buffer in enumerate(buffers)])


def by_exchange(terms: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first dimension, each contribution rounded once."""
    total = torch.empty_like(terms[0])
    add_in_order([term.to(dtype) for term in terms], into=total)
    return total


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    for name, dtype in DTYPES.items():
        unit_roundoff = torch.finfo(dtype).eps / 2
        for size in WORLD_SIZES:
            terms = torch.randn(size, size * SHARD_NUMEL, generator=generator)
            exact, magnitude = terms.double().sum(0), terms.double().abs().sum(0)
            told = []
            for method, num_roundings in ((by_exchange, 1), (by_ring, size - 1)):
                error = (method(terms, dtype).double() - exact).abs()
                rms = error.square().mean().sqrt() / exact.square().mean().sqrt()
                bound = ((1 + unit_roundoff) ** num_roundings - 1) * magnitude
                told.append(f"{float(rms):.1e} ({float((error / bound).max()):.2f})")
            print(f"{name} on {size:2} ranks   exchange {told[0]}   ring {told[1]}")


if __name__ == "__main__":
    main()
