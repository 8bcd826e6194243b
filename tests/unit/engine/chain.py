"""A chain of layers for tests that watch when what is communicated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dearmpi import DistributedOptimizer
from dearmpi.comm.api.collectives import Buffer
from dearmpi.comm.world import World
from tests.fakes import FakeHub
from tests.mpi.models import fill

Moment = Callable[[str], None]
REDUCE_SCATTERS, ALL_GATHERS = 2, 3  # communicators in the order of their duplication
_ONE_LAYER_MB = 1e-6


class _AtBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, moment: Moment, label: str) -> Tensor:
        ctx.moment, ctx.label = moment, label
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.moment(ctx.label)
        return grads[0], None, None


class Chain(nn.Module):
    """``size`` layers of one matrix each, of different sizes; calls ``moment`` with ``F0`` when
    layer 0 computes, and with ``B0`` when backprop comes to it."""

    def __init__(self, size: int, moment: Moment = lambda label: None) -> None:
        super().__init__()
        self.moment = moment
        widths = [4 * (number + 1) for number in range(size + 1)]
        self.layers = nn.ModuleList(
            nn.Linear(one, other, bias=False)
            for one, other in zip(widths, widths[1:], strict=False)
        )
        fill(self)
        for number, layer in enumerate(self.layers):
            # Registered before the engine's, which goes to the front: parameters are current here.
            layer.register_forward_pre_hook(lambda *_, label=f"F{number}": self.moment(label))

    def forward(self, inputs: Tensor, num_layers: int | None = None) -> Tensor:
        for number, layer in enumerate(self.layers[:num_layers]):
            inputs = _AtBackward.apply(layer(inputs), self.moment, f"B{number}").tanh()  # type: ignore[no-untyped-call]
        return inputs

    def backward(self, num_layers: int | None = None) -> None:
        """Feed-forward and backprop of the first ``num_layers``, or all, of the same loss."""
        loss: Tensor = self(torch.ones(2, 4), num_layers).square().mean()
        loss.backward()


def name_of_bucket(size: int, num_layers: int) -> Callable[[Buffer], str]:
    """Labels for a ``FakeHub`` of ``size`` ranks: a ``Chain``'s bucket, one per layer."""
    names = {}
    for number in range(num_layers):
        numel = 16 * (number + 1) * (number + 2)
        names[-(-numel // size) * size] = str(number)
    return lambda buffer: names.get(buffer.numel(), "") if buffer.element_size() == 4 else ""


def distribute(model: Chain, world: World, **settings: Any) -> DistributedOptimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"bucket_cap_mb": _ONE_LAYER_MB, **settings}
    return DistributedOptimizer(optimizer, model, world=world, **settings)


def operations(hub: FakeHub, rank: int, communicator: int) -> list[str]:
    return [r.label for r in hub.records if (r.rank, r.communicator) == (rank, communicator)]
