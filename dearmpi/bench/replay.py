"""Replay: a model with true parameters whose computation is replaced by sleeping.

To the host, a node with an accelerator looks like this: kernels run elsewhere while the process
waits without a core. Parameters, gradients, hooks and the order of everything are real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dearmpi.plan.data.workload import LayerSpec
from dearmpi.plan.model.profile import ModelProfile
from dearmpi.torch_internals import module_table

_ROOT = "itself"  # the layer of parameters that belong to no part of the model
_MOST_DEBT_S = 0.010  # what the operating system adds to a sleep; a longer delay is no such thing


class Pacer:
    """Spends given times so that they add up, although every sleep lasts a little too long.

    What one sleep took too long, the next ones are shorter. Delays beyond ``_MOST_DEBT_S`` are
    not made up for: something else held the process up.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._debt_s = 0.0

    def now(self) -> float:
        return self._clock()

    def spend(self, seconds: float, *, since: float) -> None:
        """Return ``seconds`` after ``since``, or sooner by what was spent too much before."""
        rest_s = since + seconds - self._debt_s - self._clock()
        if rest_s > 0:
            self._sleep(rest_s)
        spent_s = self._clock() - since
        self._debt_s = min(_MOST_DEBT_S, max(0.0, self._debt_s + spent_s - seconds))


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What a layer does instead of computing. gradient: of all elements of its gradients."""

    pace: Pacer
    feed_forward_s: float
    backprop_s: float
    gradient: float


class ReplayLayer(nn.Module):
    """A layer with the parameters of ``spec``.

    Its own attributes begin with an underscore: the others' names may be those of a user's
    parameters and modules.
    """

    def __init__(self, spec: LayerSpec, work: LayerWork) -> None:
        super().__init__()
        self._work = work
        self._used: tuple[str, ...] = ()
        for param in spec.params:
            self._add(
                spec.short_name(param).replace(".", "_"),
                nn.Parameter(
                    torch.zeros(param.shape, dtype=getattr(torch, param.dtype)),
                    requires_grad=param.trained,
                ),
            )

    def _tie(self, name: str, param: nn.Parameter) -> None:
        """Compute with ``param`` of another layer too, where its full name is ``name``."""
        short = name.rpartition(".")[2]
        self._add(name.replace(".", "_") if hasattr(self, short) else short, param)

    def forward(self, inputs: Tensor) -> Tensor:
        """Pass ``inputs`` on after the time of the feed-forward."""
        # Looked up one by one, as a layer does, so that hooks on the parameters run.
        params = [getattr(self, name) for name in self._used]
        output: Tensor = _Spend.apply(inputs, self._work, *params)  # type: ignore[no-untyped-call]
        return output

    def _add(self, name: str, param: nn.Parameter) -> None:
        self.register_parameter(name, param)
        self._used += (name,)


class _Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, work: LayerWork, *params: Tensor) -> Tensor:
        start = work.pace.now()
        ctx.work, ctx.like = work, [(param.shape, param.dtype) for param in params]
        outputs = inputs.clone()
        work.pace.spend(work.feed_forward_s, since=start)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        work: LayerWork = ctx.work
        start = work.pace.now()
        made = [
            torch.full(shape, work.gradient, dtype=dtype) if needed else None
            for (shape, dtype), needed in zip(ctx.like, ctx.needs_input_grad[2:], strict=True)
        ]
        work.pace.spend(work.backprop_s, since=start)
        return grads[0], None, *made


class ReplayModel(nn.Module):
    """The layers of ``profile``, one after the other, under their true names and with its times.

    gradient: the value of every element of every gradient.
    """

    def __init__(
        self, profile: ModelProfile, *, gradient: float = 1.0, pace: Pacer | None = None
    ) -> None:
        super().__init__()
        pace = pace or Pacer()
        self._order: list[ReplayLayer] = []
        params: dict[str, nn.Parameter] = {}
        for spec, times in profile.layers():
            work = LayerWork(pace, times.feed_forward_s, times.backprop_s, gradient)
            layer = ReplayLayer(spec, work)
            own = layer.parameters(recurse=False)
            params |= dict(zip((param.name for param in spec.params), own, strict=True))
            self._order.append(layer)
            _place(self, (spec.name or _ROOT).split("."), layer)
        for layer, spec in zip(self._order, profile.workload.layers, strict=True):
            for name in spec.uses:
                layer._tie(name, params[name])

    def forward(self, inputs: Tensor) -> Tensor:
        """Run all layers on ``inputs``, of any shape."""
        for layer in self._order:
            inputs = layer(inputs)
        return inputs


def _place(root: nn.Module, path: Sequence[str], layer: ReplayLayer) -> None:
    """Make ``layer`` the module at ``path``, below modules that do nothing where there are none."""
    parent = root
    for name in path[:-1]:
        if name not in module_table(parent):
            parent.add_module(name, nn.Module())
        parent = parent.get_submodule(name)
    above = module_table(parent).get(path[-1])
    parent.add_module(path[-1], layer)
    for name, module in module_table(above).items() if above is not None else ():
        layer.add_module(name, module)
