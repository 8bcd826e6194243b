"""PrimalDual: the optimizer of CoDA, which is ``LocalOptimizer.average(PrimalDual(...))``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dearmpi.errors import ConfigError, UsageError


class PrimalDual(Optimizer):
    """SGD near the point at which its stage began, and ascent in what an ``AucLoss`` maximises.

    A stage has ``stage_steps`` steps; then the learning rate is divided by ``decay``, and
    parameters are held near where they are now. Give ``stage_steps`` as a multiple of
    ``sync_every``, so that a stage begins with equal parameters.

    Source: CoDA, arXiv 2005.02426, with the last iterate of a stage as its code has it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.1,
        gamma: float = 500.0,
        stage_steps: int | None = None,
        decay: float = 3.0,
        clip: float | None = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        """gamma: parameters are pulled back by their distance over it; ``inf``: not at all.
        clip: of the gradient's norm over all parameters; None: none. stage_steps: None: one stage.

        Raises ConfigError for numbers out of range.
        """
        for name, value, is_good in (
            ("lr", lr, 0 < lr < math.inf),
            ("gamma", gamma, gamma > 0),
            ("stage_steps", stage_steps, stage_steps is None or stage_steps >= 1),
            ("decay", decay, 1 <= decay < math.inf),
            ("clip", clip, clip is None or clip > 0),
            ("weight_decay", weight_decay, 0 <= weight_decay < math.inf),
        ):
            if not is_good:
                raise ConfigError(f"{name} is {value}, out of its range", code="out-of-range")
        defaults = {"lr": lr, "gamma": gamma, "stage_steps": stage_steps, "decay": decay}
        super().__init__(params, {**defaults, "clip": clip, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on the parameters that have gradients."""
        if closure is not None:
            raise UsageError(
                "PrimalDual has no step() with a closure: call backward() before step()",
                code="local-steps-forbid",
            )
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            grads = [param.grad.clone() for param in params]
            if group["clip"] is not None and grads:
                norm = torch.nn.utils.get_total_norm(grads)
                scale = (group["clip"] / (norm + 1e-6)).clamp(max=1.0)
                grads = [grad.mul_(scale) for grad in grads]
            for param, grad in zip(params, grads, strict=True):
                self._move(param, grad, group)

    def _move(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = 0
        length, is_dual = group["stage_steps"], getattr(param, "is_dual", False)
        stage = 0 if length is None else state["step"] // length
        if not is_dual and math.isfinite(group["gamma"]):
            if state["step"] == 0 or (length is not None and state["step"] % length == 0):
                state["start"] = param.detach().clone()
            grad.add_(param - state["start"], alpha=1 / group["gamma"])
        if not is_dual and group["weight_decay"]:
            grad.add_(param, alpha=group["weight_decay"])
        param.sub_(grad, alpha=group["lr"] / group["decay"] ** stage)
        if getattr(param, "least", None) is not None:
            param.clamp_(min=param.least)  # type: ignore[attr-defined]
        state["step"] += 1
