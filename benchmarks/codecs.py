"""What does it cost one core to encode and decode a number?

Each candidate works on normally distributed fp32 numbers, in turns with the others; CPU time of the
thread, the least of many rounds. A candidate that is not part of dearmpi stands for what its core
operation costs in torch.

Usage: python benchmarks/codecs.py [ELEMENTS ...]; default 1000000 25000000
Prints ns per element, and as a multiple of a copy in bf16.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from dearmpi.engine.codec.largest import largest
from dearmpi.engine.codec.quantized import quantizer_of

NUM_ROUNDS = 15
DENSITY = 0.01
Work = Callable[[], object]


def quantized(values: torch.Tensor, *, name: str, chance: int | None) -> dict[str, Work]:
    """Encoding, and decoding by which numbers are added to others."""
    quantizer = quantizer_of(name)  # type: ignore[arg-type]
    message = torch.zeros(quantizer.num_bytes(len(values)), dtype=torch.uint8)
    total = torch.zeros_like(values)
    label = name if chance is None else f"{name} by chance"
    return {
        f"{label}: encode": lambda: quantizer.encode(values, message, chance=chance),
        f"{label}: decode and add": lambda: list(quantizer.decode(message, total, adds=True)),
    }


def candidates(values: torch.Tensor) -> dict[str, Work]:
    """By name."""
    half, copy = values.to(torch.bfloat16), torch.empty_like(values)
    few = int(len(values) * DENSITY)
    block, whole = copy[:few], len(values) // 1024 * 1024
    threshold, weights = 2 * 0.85 * largest(values, few)[1], torch.randn(1024, 2)
    return {
        "bf16: copy": lambda: half.copy_(values),
        "fp32: copy": lambda: copy.copy_(values),
        **quantized(values, name="int8", chance=None),
        **quantized(values, name="int4", chance=None),
        **quantized(values, name="int4", chance=1),
        "random-block of 1 %: add to a residual, copy": lambda: (
            copy.add_(values),
            block.copy_(values[:few]),
        ),
        "topk of 1 %: add to a residual, choose": lambda: (
            torch.add(values, values, out=copy),
            largest(copy, few, threshold),
        ),
        "block-topk: add to a residual, project": lambda: (
            torch.add(values, values, out=copy),
            torch.mm(copy[:whole].view(-1, 1024), weights),
        ),
        "top 1 %: torch.topk of magnitudes": lambda: torch.topk(values.abs(), few, sorted=False),
    }


def main() -> None:
    """Print a table for each number of elements."""
    torch.set_num_threads(1)
    for numel in [int(word) for word in sys.argv[1:]] or [1_000_000, 25_000_000]:
        works = candidates(torch.randn(numel, generator=torch.Generator().manual_seed(0)))
        least = dict.fromkeys(works, float("inf"))
        for _ in range(NUM_ROUNDS):
            for name, work in works.items():
                start = time.thread_time_ns()
                work()
                least[name] = min(least[name], time.thread_time_ns() - start)
        print(f"\n{numel} elements{'':34} ns an element   of a bf16 copy")
        for name, total in least.items():
            print(f"{name:50}{total / numel:14.2f}{total / least['bf16: copy']:14.1f} x")


if __name__ == "__main__":
    main()
