"""Codasca: local steps that are corrected for what is peculiar to each rank's data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.comm.world import World
from dearmpi.config import EngineConfig
from dearmpi.engine.trace.spans import Traffic
from dearmpi.local.anchor import Anchor
from dearmpi.local.area import PrimalDual
from dearmpi.local.local_optimizer import AVERAGING, LocalOptimizer


class Codasca(LocalOptimizer):
    """``LocalOptimizer.average`` for ranks with unequal data: each corrects its gradients by the
    difference of all ranks' mean gradient and its own, of the round before.

    It exchanges twice as many bytes. Corrections of all ranks add up to zero. Where ``PrimalDual``
    clips gradients, their means are of clipped ones, since the steps are.
    Source: CODASCA, arXiv 2102.04635.
    """

    _own_kind = "corrections", "they are zero until the next exchange"

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
        super().__init__(
            inner, model, sync_every=sync_every, world=world, config=config, **AVERAGING
        )
        zeros = {name: torch.zeros_like(param) for name, param in self._trained.items()}
        self._means = Anchor(
            {name: nn.Parameter(value) for name, value in zeros.items()},
            world=self.world,
            lr=1.0,
            momentum=0.0,
            config=self.outer.config,
        )
        self._sums = {name: value.clone() for name, value in zeros.items()}
        self._corrections = zeros
        self._steps_in_round = 0
        self._names: dict[Tensor, str] = {param: name for name, param in self._trained.items()}
        if isinstance(inner, PrimalDual):
            inner.correct = self._correct

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for exchanges."""
        return super().waited_s + self._means.outer.waited_s

    @property
    def traffic(self) -> Traffic:
        """The bytes of an exchange, of values and of gradients."""
        values, means = super().traffic, self._means.outer.traffic
        return replace(
            values,
            reduced=values.reduced + means.reduced,
            gathered=values.gathered + means.gathered,
            dense=values.dense + means.dense,
        )

    def progress(self) -> dict[str, Any]:
        """As the base class, with the place in the round."""
        return {
            **super().progress(),
            "sync_every": self.exchanges.sync_every,
            "steps_in_round": self._steps_in_round,
        }

    @torch.no_grad()
    def _step_alone(self) -> None:
        unused = [param for name, param in self._trained.items() if self._lacks(name, param)]
        for param in unused:
            param.grad = torch.zeros_like(param)
        if not isinstance(self._optimizer, PrimalDual):
            for param in self._trained.values():
                if param.grad is not None:
                    self._correct(param, param.grad)
        super()._step_alone()
        for param in unused:
            param.grad = None
        self._steps_in_round += 1

    def _lacks(self, name: str, param: Tensor) -> bool:
        """Whether this rank does not use ``param``, but others' gradients correct it."""
        if param.grad is not None or not param.requires_grad:
            return False
        return bool(self._corrections[name].any())

    def _correct(self, param: Tensor, grad: Tensor) -> None:
        name = self._names.get(param)
        if name is None:  # without elements, so that nothing of it travels
            return
        self._sums[name].add_(grad)
        grad.add_(self._corrections[name])

    @torch.no_grad()
    def _exchange(self) -> None:
        super()._exchange()
        if self.exchanges.starting(self.num_steps) is None:
            return
        own = {name: total.div_(self._steps_in_round) for name, total in self._sums.items()}
        self._means.wait()
        for mean in self._means.shared.values():
            mean.zero_()  # an outer SGD with lr 1 then leaves the mean of what ranks bring
        self._means.start_exchange(tuple(own), own)
        self._means.wait()
        for name, mean in self._means.shared.items():
            self._corrections[name].copy_(mean - own[name])
            self._sums[name].zero_()
        self._steps_in_round = 0

    def _close_exchanges(self) -> None:
        super()._close_exchanges()
        if isinstance(self._optimizer, PrimalDual):
            self._optimizer.correct = None
        self._means.close()

    def _own_tensors(self) -> dict[str, dict[str, Tensor]]:
        return {
            name: {"gradients": self._sums[name], "correction": self._corrections[name]}
            for name in self._trained
        }

    def _fault_of(self, local: Mapping[str, Any]) -> str:
        every, saved = self.exchanges.sync_every, local.get("sync_every")
        if saved is None:
            return "the state has no corrections; load what state_dict() of a Codasca returned"
        if saved != every:
            return f"the state is of sync_every {saved} instead of {every}; give {saved}"
        if local["world_size"] == self.world.size and local["rank"] != self.world.rank:
            return (
                f"the state is of rank {local['rank']}, and corrections belong to a rank's data; "
                "load each rank's own state"
            )
        return super()._fault_of(local)

    def _take_own(self, local: Mapping[str, Any], is_own: bool) -> None:
        """On another number of ranks all begin with the mean: corrections still add up to zero."""
        self._steps_in_round = local["steps_in_round"] if is_own else 0
        super()._take_own(local, is_own)
