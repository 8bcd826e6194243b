"""Facade: what of torch's Optimizer stands before another one, which does the work."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dearmpi.engine import refusal
from dearmpi.engine.gathered_state import GatheredState

_SHARED = ("param_groups", "state")


class Facade(Optimizer):
    """An optimizer with the param groups of ``_optimizer``, in whose place it stands.

    Whatever a script does to param groups or state that would not reach the other is refused: at
    once, or in the next ``step``.
    """

    _optimizer: Optimizer
    _members: list[list[Tensor]]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SHARED and "_members" in vars(self):
            raise refusal.assigned(name)
        super().__setattr__(name, value)

    def _share(self, state: Any) -> None:
        """Show the param groups as they are now, and ``state``."""
        groups = self._optimizer.param_groups
        vars(self).update(param_groups=groups, state=state)
        self._members = [list(group["params"]) for group in groups]

    def _check_shared(self) -> None:
        """Raise UsageError if param groups have other parameters, or the state shown was changed.

        Called in each step: lists of the same tensors are compared in a microsecond.
        """
        if self.param_groups is not self._optimizer.param_groups:
            raise refusal.divorced()
        try:
            differ = [group["params"] for group in self.param_groups] != self._members
        except RuntimeError:  # one tensor compared with another has no truth value
            differ = True
        if differ:
            raise refusal.regrouped()
        if isinstance(self.state, GatheredState):
            self.state.check()
