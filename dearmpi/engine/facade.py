"""Facade: what of torch's Optimizer stands before another one, which does the work."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from dearmpi.engine import refusal
from dearmpi.engine.setup.optimizer_state import MODES, has_mode
from dearmpi.engine.state.gathered_state import GatheredState, show_same
from dearmpi.guessed import OPTIMIZER, answer_guess
from dearmpi.torch_internals import STEPPED_MARK

_SHARED = ("param_groups", "state")


class Facade(Optimizer):
    """An optimizer with the param groups of ``_optimizer``, in whose place it stands.

    Whatever a script does to param groups or state that would not reach the other is refused: at
    once, or in the next ``step``.
    """

    _optimizer: Optimizer
    _members: list[list[Tensor]]
    _attributes: dict[str, Any]

    if not TYPE_CHECKING:  # which would take any name for one that there is

        def __getattr__(self, name: str) -> Any:
            """``train`` and ``eval`` where the wrapped optimizer has them.

            Raises AttributeError for others; names of other libraries lead to those here.
            """
            if name in MODES and has_mode(vars(self).get("_optimizer"), name):
                return partial(self._switch, name)
            told = answer_guess("DistributedOptimizer", name, OPTIMIZER)
            if told is not None:
                raise AttributeError(told)
            return super().__getattribute__(name)  # raises as if this method were not there

    def __reduce__(self) -> NoReturn:
        raise refusal.copied()

    def __setattr__(self, name: str, value: Any) -> None:
        if "_members" in vars(self):
            if name in _SHARED and value is not vars(self)[name]:
                if name == "state" and show_same(vars(self)[name], value):
                    return
                raise refusal.assigned(name)
            # Where the wrapped one alone has such a thing, it is meant.
            if name in vars(self._optimizer) and name != STEPPED_MARK and not hasattr(self, name):
                raise refusal.set_on_optimizer(name)
        super().__setattr__(name, value)

    def _switch(self, mode: str) -> None:
        """Call the wrapped optimizer's ``train()`` or ``eval()`` for the parameters."""
        raise NotImplementedError

    def _share(self, state: Any) -> None:
        """Show the param groups as they are now, and ``state``."""
        groups = self._optimizer.param_groups
        vars(self).update(param_groups=groups, state=state)
        self._members = [list(group["params"]) for group in groups]
        self._attributes = dict(vars(self._optimizer))

    def _mark_stepped(self) -> None:
        """A scheduler made for the wrapped optimizer looks whether that one's step was called."""
        vars(self._optimizer)[STEPPED_MARK] = True

    def _check_shared(self) -> None:
        """Raise UsageError if param groups have other parameters, the state shown was changed, or
        the wrapped optimizer has attributes that its copies, one for each bucket, have not.

        Called in each step: what is the same is compared in a microsecond.
        """
        if self.param_groups is not self._optimizer.param_groups:
            raise refusal.divorced()
        try:
            differ = [list(group["params"]) for group in self.param_groups] != self._members
        except RuntimeError:  # one tensor compared with another has no truth value
            differ = True
        if differ:
            raise refusal.regrouped()
        if isinstance(self.state, GatheredState):
            self.state.check()
            self._check_attributes()

    def _check_attributes(self) -> None:
        now, before = vars(self._optimizer), self._attributes
        if _are_same(now, before):
            return
        for name in {**before, **now}:
            is_method = callable(getattr(type(self._optimizer), name, None))
            if is_method or name == STEPPED_MARK:  # such as the step, which schedulers watch
                continue
            if name not in now or name not in before or not _are_same(now[name], before[name]):
                raise refusal.set_on_optimizer(name)
        self._attributes = dict(now)


def _are_same(one: Any, other: Any) -> bool:
    """Whether they are equal; identical ones are, and are not looked at any further."""
    try:
        return one is other or bool(one == other)
    except (RuntimeError, ValueError):  # tensors and arrays have no one truth value
        return False
