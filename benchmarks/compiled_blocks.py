"""What is hidden behind the feed-forward where blocks of a model are compiled?

    bin/netlab run 4 python benchmarks/compiled_blocks.py [BLOCKS] [COMPUTE_S]

Trains a stack of linear blocks whose computation is a sleep inside the compiled graph: as it is,
with each block compiled, and compiled as a whole. Prints the median iteration of each, in turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer, connect

WIDTH, ROUNDS, NUM_STEPS, NUM_WARMUP = 1024, 2, 6, 3


@torch.library.custom_op("dearmpi::rest", mutates_args=())
def rest(inputs: Tensor, feed_forward_s: float) -> Tensor:
    """Take as long as a layer on an accelerator does."""
    time.sleep(feed_forward_s)
    return inputs.clone()


@rest.register_fake
def _(inputs: Tensor, feed_forward_s: float) -> Tensor:
    return torch.empty_like(inputs)


def keep_time(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    """Backprop takes twice as long."""
    ctx.backprop_s = 2 * inputs[1]


def rest_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    """Backprop of ``rest``."""
    return rest(grad, ctx.backprop_s), None


rest.register_autograd(rest_back, setup_context=keep_time)


class Block(nn.Module):
    """One layer of ``WIDTH`` x ``WIDTH`` parameters."""

    def __init__(self, feed_forward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.feed_forward_s = feed_forward_s

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = rest(inputs + self.linear(inputs), self.feed_forward_s)
        return outputs


class Stack(nn.Module):
    """Blocks in a row; by its own forward, since torch does not compile that of Sequential."""

    def __init__(self, num_blocks: int, feed_forward_s: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(feed_forward_s / num_blocks) for _ in range(num_blocks))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def compile_blocks(model: Stack) -> None:
    """Each by itself, with one graph for all."""
    for block in model.blocks:
        block.compile(backend="aot_eager")


def compile_whole(model: Stack) -> None:
    """As one graph."""
    model.compile(backend="aot_eager")


KINDS: dict[str, Callable[[Stack], None]] = {
    "not compiled": lambda model: None,
    "blocks compiled": compile_blocks,
    "compiled as a whole": compile_whole,
}


def main() -> None:
    num_blocks, text = [*sys.argv[1:], *("24", "1.5")[len(sys.argv) - 1 :]]
    world = connect()
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(ROUNDS):
        for kind, compiled in KINDS.items():
            model = Stack(int(num_blocks), float(text) / 3)
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1e-6), model, world=world
            )
            compiled(model)
            for step in range(NUM_WARMUP + NUM_STEPS):
                begin_s = time.perf_counter()
                optimizer.zero_grad()
                model(torch.ones(1, WIDTH)).sum().backward()
                optimizer.step()
                if step >= NUM_WARMUP:
                    seconds[kind].append(time.perf_counter() - begin_s)
            optimizer.close()
            torch.compiler.reset()
    if world.rank == 0:
        for kind, values in seconds.items():
            print(f"{kind:20s} {median(values):.3f} s ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
