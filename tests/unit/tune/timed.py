"""Models whose layers take a time that is known, and what a profile says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dearmpi.plan.model.profile import ModelProfile
from dearmpi.tune.layer_timer import LayerTimer
from tests.fakes import FakeClock


class ClockStopwatch:
    """Marks are readings of a clock that only the tests' models move."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def mark(self) -> float:
        return self._clock.now()

    def settle(self) -> None:
        pass

    def seconds(self, start: float, stop: float) -> float:
        return stop - start


class _AtBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, advance: Callable[[], None]) -> Tensor:
        ctx.advance = advance
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.advance()
        return grads[0], None


def spend(inputs: Tensor, clock: FakeClock, *, forward: float = 0, backward: float = 0) -> Tensor:
    """``inputs``, after some time; as much as is said for the backprop passes there."""
    clock.advance(forward)
    outputs: Tensor = _AtBackward.apply(inputs, lambda: clock.advance(backward))  # type: ignore[no-untyped-call]
    return outputs


class Timed(nn.Linear):
    """A layer whose time is known."""

    def __init__(self, clock: FakeClock, forward: float, backward: float, **kw: Any) -> None:
        super().__init__(4, 4, **kw)
        self.clock, self.times = clock, (forward, backward)

    def forward(self, input: Tensor) -> Tensor:
        forward, backward = self.times
        return spend(super().forward(input), self.clock, forward=forward, backward=backward)


def chain(clock: FakeClock) -> nn.Sequential:
    return nn.Sequential(Timed(clock, 1, 10), Timed(clock, 2, 20), Timed(clock, 3, 30))


def set_times(layer: nn.Module, forward: float, backward: float) -> None:
    assert isinstance(layer, Timed)
    layer.times = (forward, backward)


def timer(model: nn.Module, clock: FakeClock, **settings: Any) -> LayerTimer:
    settings = {"num_warmup": 0, "stopwatch": ClockStopwatch(clock), **settings}
    return LayerTimer(model, **settings)


def train(model: nn.Module, num_passes: int = 1) -> None:
    for _ in range(num_passes):
        model(torch.ones(2, 4)).sum().backward()


def shown(profile: ModelProfile) -> list[tuple[str, float, float]]:
    return [(layer.name, t.feed_forward_s, t.backprop_s) for layer, t in profile.layers()]


def params_of(profile: ModelProfile) -> dict[str, list[str]]:
    return {layer.name: [spec.name for spec in layer.params] for layer, _ in profile.layers()}
