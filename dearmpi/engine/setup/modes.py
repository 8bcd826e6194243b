"""Modes of an optimizer that has ``train()`` and ``eval()``, as schedule-free ones do.

They move parameters between two points that the optimizer's state tells, and note in the param
groups at which of them these are.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dearmpi.comm.world import World
from dearmpi.engine.probe.counting import changed_option
from dearmpi.engine.setup.assembly import Assembly
from dearmpi.engine.state.sharded_state import gather_state
from dearmpi.engine.update.update import clone, read_options
from dearmpi.errors import UsageError
from dearmpi.torch_internals import version_of

MODES = frozenset(("train", "eval"))


def has_mode(optimizer: Optimizer, mode: str) -> bool:
    """Whether ``optimizer`` has a method called ``mode``, of those above."""
    return mode in MODES and callable(getattr(type(optimizer), mode, None))


def is_in_mode(optimizer: Optimizer, mode: str) -> bool:
    """Whether the param groups say that nothing is to be done."""
    (other,) = MODES - {mode}
    if not has_mode(optimizer, other):
        return False
    now = read_options(optimizer)
    groups = [{**group, "params": []} for group in now]
    twin = clone(optimizer, groups, defaultdict(dict))
    getattr(type(optimizer), mode)(twin)
    in_mode = read_options(twin)
    getattr(type(optimizer), other)(twin)
    is_told = all(map(changed_option, read_options(twin), in_mode))
    return is_told and not any(map(changed_option, now, in_mode))


def switch(optimizer: Optimizer, assembly: Assembly, world: World, mode: str) -> None:
    """Have ``optimizer`` change parameters and param groups by its ``train()`` or ``eval()``, on
    every rank with the whole state (collective).

    Raises UsageError for a method that changes the state as well, and where parameters have master
    copies, which it would not reach.
    """
    act: Any = getattr(type(optimizer), mode)
    if not assembly.updates:
        act(optimizer)
        return
    name = f"{type(optimizer).__name__}.{mode}()"
    if assembly.masters.weights or assembly.masters.gathered_as is not None:
        raise UsageError(
            f"{name} changes parameters, and would not reach their master copies; leave "
            "master_weights, comm_dtype and update_on='host' out, or use gather='gradients' with "
            "comm_dtype",
            code="mode-not-served",
        )
    whole = gather_state(world, assembly.updates)
    names = assembly.blueprint.names
    state = {param: whole[name] for param, name in names.items() if whole.get(name)}
    held = [v for entries in state.values() for v in entries.values() if isinstance(v, Tensor)]
    versions = [version_of(tensor) for tensor in held]
    act(clone(optimizer, optimizer.param_groups, defaultdict(dict, state)))
    if versions != [version_of(tensor) for tensor in held]:
        raise UsageError(
            f"{name} changes the optimizer's state, which lies in the buckets' updates and stays "
            "as it was; train without dearmpi, or with a method that changes parameters alone",
            code="mode-not-served",
        )
