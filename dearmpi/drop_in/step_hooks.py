"""Steps: torch's hooks around steps, by which an optimizer of a wrapped model becomes known.

Its first step is torch's own, on averaged gradients; the next ones are an engine's. What no engine
can serve, such as LBFGS, goes on stepping by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ref

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import dearmpi
from dearmpi import DistributedOptimizer, World
from dearmpi.drop_in.arguments import note
from dearmpi.drop_in.served_optimizer import KnownOptimizers, ServedOptimizer, params_of
from dearmpi.errors import ConfigError

if TYPE_CHECKING:
    from dearmpi.drop_in.serving import ModelServing


class _Hooks:
    """Of this process."""

    is_on: ClassVar[bool] = False


def watch_steps(model: ModelServing) -> None:
    """See the steps of optimizers that have parameters of ``model``."""
    KnownOptimizers.models.add(model)
    if not _Hooks.is_on:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _Hooks.is_on = True


def serve(optimizer: Optimizer) -> None:
    """Build the optimizer's engine, if one can serve it (collective)."""
    models = KnownOptimizers.models_of(optimizer)
    world = dearmpi.connect()
    known = {p for model in models for p in model.names}
    if not all(p in known or not p.requires_grad for p in params_of(optimizer)):
        _refuse(world, optimizer, "has parameters of no wrapped model")
        return
    for model in models:
        model.stop_averager()
    try:
        served = ServedOptimizer(optimizer, models, world)
    except ConfigError as error:
        _refuse(world, optimizer, str(error))
        return
    KnownOptimizers.served[optimizer] = ref(served)
    for model in models:
        model.engines.append(served)


def _refuse(world: World, optimizer: Optimizer, reason: str) -> None:
    KnownOptimizers.refused.add(optimizer)
    name = type(optimizer).__name__
    note(world, f"{name} steps by itself, with no communication behind the forward: {reason}")


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """A step that no engine takes finds averaged gradients."""
    if isinstance(optimizer, DistributedOptimizer) or optimizer in KnownOptimizers.served:
        return None
    models = KnownOptimizers.models_of(optimizer)
    if not models:
        return None
    wanted = set(params_of(optimizer))
    for model in models:
        for served in list(model.engines):
            if not wanted.isdisjoint(served.params()):
                _contest(served, optimizer)

    def average() -> None:
        for model in models:
            model.average_now()

    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        average()
        return None

    def evaluate() -> Any:
        loss = closure()
        average()
        return loss

    if len(args) > 1:
        return (args[0], evaluate, *args[2:]), kwargs
    return args, {**kwargs, "closure": evaluate}


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The first step is over: the next ones are an engine's."""
    if isinstance(optimizer, DistributedOptimizer) or optimizer in KnownOptimizers.served:
        return
    if optimizer not in KnownOptimizers.refused and KnownOptimizers.models_of(optimizer):
        serve(optimizer)


def _contest(served: ServedOptimizer, optimizer: Optimizer) -> None:
    """Another optimizer steps on the same parameters: where they take turns, each by itself."""
    served.release()
    if optimizer in KnownOptimizers.released:
        KnownOptimizers.refused.update((served.optimizer, optimizer))
    KnownOptimizers.released.add(served.optimizer)
