"""Tensor parallel in two ranks, data parallel over the pairs: mpirun -n 4 python this_file.

Each rank holds half of the hidden layer. The two ranks of a pair add up their halves in each
forward; ranks that hold the same half average its gradients, hidden as always. One process gives
the same numbers.
"""

from typing import Any

import torch
from torch import Tensor, nn

import dearmpi

INPUTS, HIDDEN, BATCH, STEPS = 8, 32, 16, 40


class AddUp(torch.autograd.Function):
    """The sum over the ranks of ``group``; each of its terms has the sum's gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dearmpi.World) -> Tensor:
        parts = part.new_zeros(group.size, part.numel())
        parts[group.rank] = part.flatten()
        group.all_gather(parts.view(-1))
        return parts.sum(0).view(part.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class HalfOfTheHidden(nn.Module):
    """The part of a network of two layers that one rank of ``group`` holds."""

    def __init__(self, group: dearmpi.World) -> None:
        super().__init__()
        self.group = group
        torch.manual_seed(0)
        first = torch.randn(HIDDEN, INPUTS).div(INPUTS**0.5)
        second = torch.randn(1, HIDDEN).div(HIDDEN**0.5)
        self.first = nn.Parameter(first.chunk(group.size)[group.rank].clone())
        self.second = nn.Parameter(second.chunk(group.size, dim=1)[group.rank].clone())

    def forward(self, inputs: Tensor) -> Tensor:
        part = torch.tanh(inputs @ self.first.t()) @ self.second.t()
        return AddUp.apply(part, self.group)  # type: ignore[no-any-return, no-untyped-call]


def main() -> None:
    torch.set_default_dtype(torch.float64)
    world = dearmpi.connect()
    width = 2 if world.size % 2 == 0 else 1
    pair, alike = world.split(world.rank // width), world.split(world.rank % width)
    assert pair is not None and alike is not None
    model = HalfOfTheHidden(pair)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = dearmpi.DistributedOptimizer(inner, model, world=alike)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        inputs = torch.randn(BATCH, INPUTS, generator=generator)
        targets = inputs[:, :1].tanh()
        mine = slice(alike.rank, None, alike.size)
        optimizer.zero_grad()
        loss = (model(inputs[mine]) - targets[mine]).square().mean()
        loss.backward()
        optimizer.step()
        mean = alike.mean(loss.item())
        if world.is_root and step % 13 == 0:
            print(f"step {step} loss {mean:.10f}")


main()
