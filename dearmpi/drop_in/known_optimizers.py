"""KnownOptimizers: all wrappers and optimizers of this process, and which belong together."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.optim import Optimizer

from dearmpi import DistributedOptimizer

if TYPE_CHECKING:
    from weakref import ReferenceType

    from dearmpi.drop_in.served_optimizer import ServedOptimizer
    from dearmpi.drop_in.serving import ModelServing


class KnownOptimizers:
    """Of this process.

    served: optimizers with an engine, which their models keep alive. refused: optimizers that step
    by themselves for good. released: those whose parameters another one has taken over. own: those
    of no script.
    """

    models: ClassVar[WeakSet[ModelServing]] = WeakSet()
    served: ClassVar[WeakKeyDictionary[Optimizer, ReferenceType[ServedOptimizer]]] = (
        WeakKeyDictionary()
    )
    refused: ClassVar[WeakSet[Optimizer]] = WeakSet()
    released: ClassVar[WeakSet[Optimizer]] = WeakSet()
    own: ClassVar[WeakSet[Optimizer]] = WeakSet()

    @classmethod
    def models_of(cls, optimizer: Optimizer) -> list[ModelServing]:
        """The wrappers that have parameters of ``optimizer``, in the order of its parameters."""
        owners = {p: model for model in cls.models for p in model.names}
        found = (owners[p] for p in params_of(optimizer) if p in owners)
        return list(dict.fromkeys(found))


def optimizers_of(params: Iterable[nn.Parameter]) -> list[Optimizer]:
    """Those that a script has made for ``params``, in the order of these; none if some overlap."""
    wanted = {param: number for number, param in enumerate(params)}
    found: dict[int, Optimizer] = {}
    for one in gc.get_objects():
        kind = type(one)
        if issubclass(kind, Optimizer) and not issubclass(kind, DistributedOptimizer):
            numbers = [wanted[p] for p in params_of(one) if p in wanted]
            if numbers and one not in KnownOptimizers.own:
                if not found.keys().isdisjoint(numbers):
                    return []
                found |= dict.fromkeys(numbers, one)
    return list(dict.fromkeys(found[number] for number in sorted(found)))


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All of its parameters, by their numbers in a state dict."""
    return [p for group in vars(optimizer).get("param_groups", ()) for p in group["params"]]
