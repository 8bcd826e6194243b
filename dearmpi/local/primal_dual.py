"""PrimalDual, and Codasca, which corrects it for unequal ranks. CoDA is
``LocalOptimizer.average(PrimalDual(...))``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.engine.setup.checks import optimized_parameters
from dearmpi.errors import CheckpointError, ConfigError, UsageError
from dearmpi.local.anchor import Anchor
from dearmpi.local.local_optimizer import LocalOptimizer


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


class Codasca:
    """``LocalOptimizer.average`` for ranks with unequal data: each corrects its gradients by the
    difference of all ranks' mean gradient and its own, of the round before.

    It exchanges twice as many bytes. Use it as an optimizer: ``zero_grad``, ``step``, ``close``.
    Source: CODASCA, arXiv 2102.04635.

    local: the optimizer that averages; its ``at_anchor`` shows what ranks share.
    """

    def __init__(
        self,
        inner: Optimizer,
        model: nn.Module,
        *,
        sync_every: int = 8,
        world: World | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        """Rank 0's parameters and buffers are copied to all ranks (collective)."""
        self.local = LocalOptimizer.average(
            inner, model, sync_every=sync_every, world=world, config=config
        )
        self.world, self._every = self.local.world, sync_every
        names = optimized_parameters(inner, model)
        self._params = {name: param for param, name in names.items() if param.is_floating_point()}
        zeros = {name: torch.zeros_like(param) for name, param in self._params.items()}
        # The mean of what ranks bring, by an outer SGD with lr 1, is what they share.
        self._anchor = Anchor(
            {name: nn.Parameter(value) for name, value in zeros.items()},
            world=self.world,
            lr=1.0,
            momentum=0.0,
            config=config or EngineConfig(),
        )
        self._sums = {name: value.clone() for name, value in zeros.items()}
        self._corrections = zeros

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients of this rank."""
        self.local.zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def step(self) -> None:
        """Take a corrected local step; the last one of a round exchanges (then collective)."""
        for name, param in self._params.items():
            if param.grad is not None:
                self._sums[name].add_(param.grad)
                param.grad.add_(self._corrections[name])
        self.local.step()
        if self.local.num_steps % self._every == 0:
            own = {name: total.div_(self._every) for name, total in self._sums.items()}
            self._anchor.start_exchange(tuple(own), own)
            self._anchor.wait()
            for name, mean in self._anchor.shared.items():
                self._corrections[name].copy_(mean - own[name])
                self._sums[name].zero_()

    def state_dict(self) -> dict[str, Any]:
        """The state of ``local`` and this rank's corrections (collective); save it on all ranks."""
        return {
            "local": self.local.state_dict(),
            "codasca": {
                **self._identity(),
                "sums": _copies(self._sums),
                "corrections": _copies(self._corrections),
                "mean": _copies(self._anchor.shared),
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from this rank's state, bit by bit (collective).

        Raises CheckpointError, on all ranks, where a state is of another rank, number of ranks,
        ``sync_every`` or model: corrections belong to a rank's data.
        """
        saved, own = state_dict.get("codasca", {}), self._identity()
        names = saved.get("sums", {}).keys()
        found = {key: saved.get(key) for key in own}
        fault = "" if found == own and names == self._sums.keys() else f"{found} instead of {own}"
        faults = self.world.all_gather_text(fault)
        if any(faults):
            rank = next(rank for rank, text in enumerate(faults) if text)
            raise CheckpointError(
                f"rank {rank} loads a state of Codasca with {faults[rank]}, or with other "
                "parameters; load each rank's own state on as many ranks",
                code="state-of-other-model",
            )
        self.local.load_state_dict(state_dict["local"])
        for values, kept in (
            (self._sums, saved["sums"]),
            (self._corrections, saved["corrections"]),
            (self._anchor.shared, saved["mean"]),
        ):
            for name, value in values.items():
                value.copy_(kept[name])

    def close(self) -> None:
        """Give back what the exchanges have taken (collective)."""
        self.local.close()
        self._anchor.close()

    def _identity(self) -> dict[str, int]:
        return {
            "rank": self.world.rank,
            "world_size": self.world.size,
            "sync_every": self._every,
        }


def _copies(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in values.items()}
