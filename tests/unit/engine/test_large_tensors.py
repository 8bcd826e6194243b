"""Optimizers that treat large tensors otherwise are refused where they would get pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.world import World
from dearmpi.errors import ConfigError
from tests.codes import raises
from tests.fakes.ranks import run_ranks

_BLOCK = 256


class Scaled(torch.optim.Optimizer):
    """Gradient descent by lengths of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def divisor(self, param: Tensor, squares: Tensor) -> Tensor:
        """Squared, by element."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                assert param.grad is not None
                divisor = self.divisor(param, param.grad.square() + 1e-6)
                param.addcdiv_(param.grad, divisor.sqrt(), value=-group["lr"])


class Factoring(Scaled):
    """As Adafactor, of matrices with ``least`` rows and columns."""

    least = 16

    def divisor(self, param: Tensor, squares: Tensor) -> Tensor:
        if param.dim() < 2 or min(param.shape) < self.least:
            return squares
        rows, columns = squares.mean(1, keepdim=True), squares.mean(0, keepdim=True)
        return rows * columns / rows.mean()


class FactoringLargeOnes(Factoring):
    least = 128


class Blockwise(Scaled):
    """Knows the largest of each block of what has 4096 elements."""

    def divisor(self, param: Tensor, squares: Tensor) -> Tensor:
        if param.numel() < 4096:
            return squares
        padding = -param.numel() % _BLOCK
        blocks = nn.functional.pad(squares.flatten(), (0, padding)).view(-1, _BLOCK)
        self.state[param]["largest"] = largest = blocks.amax(1, keepdim=True)
        kept = largest.expand_as(blocks).flatten()[: param.numel()]
        return self.choose(squares, kept.view_as(param))

    def choose(self, squares: Tensor, largest: Tensor) -> Tensor:
        """Which of them counts."""
        return largest


class WholeBlocks(Blockwise):
    """And leaves alone what is not made up of whole ones."""

    def divisor(self, param: Tensor, squares: Tensor) -> Tensor:
        return squares if param.numel() % _BLOCK else super().divisor(param, squares)


class BlockwiseNotes(Blockwise):
    """Keeps it for nothing."""

    def choose(self, squares: Tensor, largest: Tensor) -> Tensor:
        return squares


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Factoring, "does not treat every element by itself"),
        (FactoringLargeOnes, "does not treat every element by itself"),
        (Blockwise, "does not treat every element by itself"),
        (WholeBlocks, "does not treat every element by itself"),
        (BlockwiseNotes, "keeps 'largest' in its state as a tensor of shape"),
    ],
)
def test_an_optimizer_that_treats_large_tensors_otherwise_is_refused(
    make: Callable[[Any], torch.optim.Optimizer], told: str
) -> None:
    """Whatever the model's size: pieces of it lie in buckets of any size."""

    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        with raises(
            ConfigError, "optimizer-needs-whole-tensors", make.__name__, told, "gather='gradients'"
        ):
            DistributedOptimizer(make(model.parameters()), model, world=world, shards="even")
        inner = make(model.parameters())
        DistributedOptimizer(inner, model, world=world, gather="gradients").close()

    run_ranks(2, rank)
