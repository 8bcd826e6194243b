"""The wrapped optimizer's state while an engine's updates hold it.

Updates take over the state that the optimizer has, each rank its part. ``pack`` shows it in plain
torch form. The optimizer gets it back where every rank has all of it. ``switch`` calls the
optimizer's ``train()`` or ``eval()``, as schedule-free ones have, which move parameters between two
points by the state, and note in the param groups at which of them these are.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dearmpi.comm.world import World
from dearmpi.engine.probe.probe import elementwise_keys, host_twin
from dearmpi.engine.probe.steadiness import changed_option
from dearmpi.engine.setup.build import BuiltEngine
from dearmpi.engine.state.options import describe_options, describe_state
from dearmpi.engine.state.sharded_state import (
    LocalState,
    gather_state,
    load_state,
    read_pieces,
    read_whole,
)
from dearmpi.engine.update.master import MASTER, dtype_of_copy, is_half
from dearmpi.engine.update.update import clone, read_options
from dearmpi.errors import UsageError
from dearmpi.torch_internals import version_of


def adopt(optimizer: Optimizer, built: BuiltEngine) -> None:
    """Have the updates take the state that ``optimizer`` has, if there are any updates.

    What it has kept for parameters of half precision becomes as wide as the masters that it is to
    work with from now on.
    """
    if built.masters.weights:
        for param in filter(is_half, built.spec.names):
            entries = optimizer.state.get(param, {})
            if MASTER not in entries:
                entries.update({k: _widen(v, param) for k, v in entries.items()})
    _hand_over(optimizer, built)


def _widen(value: Any, param: Tensor) -> Any:
    if isinstance(value, Tensor) and is_half(value):
        return value.to(dtype_of_copy(param))
    return value


def _hand_over(optimizer: Optimizer, built: BuiltEngine) -> None:
    state, names = optimizer.state, built.spec.names
    masters, on_host = built.masters, built.spec.config.update_on == "host"
    with torch.no_grad():
        for param, name in names.items():
            if param in state:
                masters.settle(param.detach(), state[param], name)
    updates = built.updates
    if updates:
        states = {n: dict(state[p]) for p, n in names.items() if p in state}
        tried = host_twin(optimizer) if on_host else optimizer
        elementwise = elementwise_keys(tried, whole=not built.shards)
        with built.comm_stream.section():
            load_state(updates, states, elementwise=elementwise)
        state.clear()


def take_over(optimizer: Optimizer, built: BuiltEngine, state_dict: dict[str, Any]) -> None:
    """Take over options and state in plain torch form, whole and the same on every rank, which the
    ranks compare in the next step; all stays as it is where the state does not fit.
    """
    groups, state = optimizer.param_groups, optimizer.state
    try:
        _load(optimizer, built, state_dict)
        lines = [
            *describe_options(optimizer),
            *describe_state(optimizer, built.spec.names),
        ]
        _hand_over(optimizer, built)
    except Exception:
        optimizer.param_groups, optimizer.state = groups, state
        raise
    built.engine.loads.note(lines)


def pack(optimizer: Optimizer, built: BuiltEngine, world: World) -> dict[str, Any]:
    """Options and state in plain torch form, whole on every rank (collective).

    Raises UsageError for shards inside ``join``, where ranks without batches gather nothing.
    """
    if built.shards:
        built.engine.joining.refuse("gathering the optimizer's state")
    packed: dict[str, Any] = optimizer.state_dict()
    if built.updates:
        whole = gather_state(world, built.updates)
        names = built.spec.names
        packed["state"] = {
            index: whole[names[param]]
            for index, param in enumerate(numbered_params(optimizer))
            if param in names and whole.get(names[param])
        }
    return packed


def read_held(optimizer: Optimizer, built: BuiltEngine) -> LocalState:
    """What this rank holds of the state; its tensors are those that the next step changes."""
    packed: dict[str, Any] = optimizer.state_dict()
    updates, names = built.updates, built.spec.names
    whole = read_whole(updates)
    if not updates:
        held = ((name, optimizer.state.get(param)) for param, name in names.items())
        whole = {name: dict(entries) for name, entries in held if entries}
    return LocalState(packed["param_groups"], whole, read_pieces(built.shards))


def hand_back(optimizer: Optimizer, built: BuiltEngine) -> bool:
    """Give ``optimizer`` its state back; False where it alone could not go on with it."""
    if built.masters.weights or built.shards:
        return False
    states = read_whole(built.updates)
    for param, name in built.spec.names.items():
        if name in states:
            optimizer.state[param] = states[name]
    return True


def numbered_params(optimizer: Optimizer) -> list[nn.Parameter]:
    """By their numbers in a state dict."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _load(optimizer: Optimizer, built: BuiltEngine, state_dict: dict[str, Any]) -> None:
    if not built.masters.weights:
        optimizer.load_state_dict(state_dict)
        return
    # It would round the state to the parameters' dtype, and put all of it beside them.
    replaced = {_stand_in(param): param for param in numbered_params(optimizer)}
    stand_ins = iter(replaced)
    optimizer.param_groups = [
        {**group, "params": [next(stand_ins) for _ in group["params"]]}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(state_dict)
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(param, param) for param in group["params"]]
    loaded = [(replaced.get(param, param), entries) for param, entries in optimizer.state.items()]
    optimizer.state.clear()
    optimizer.state.update(loaded)


def _stand_in(param: Tensor) -> Tensor:
    """Something in host memory, of which it takes none, as wide as the master copy of ``param``."""
    return torch.zeros((), dtype=dtype_of_copy(param), device="cpu").expand(param.shape)


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


def switch(optimizer: Optimizer, built: BuiltEngine, world: World, mode: str) -> None:
    """Have ``optimizer`` change parameters and param groups by its ``train()`` or ``eval()``, on
    every rank with the whole state (collective).

    Raises UsageError for a method that changes the state as well, and where parameters have master
    copies, which it would not reach.
    """
    act: Any = getattr(type(optimizer), mode)
    if not built.updates:
        act(optimizer)
        return
    name = f"{type(optimizer).__name__}.{mode}()"
    if built.masters.weights or built.masters.gathered_as is not None:
        raise UsageError(
            f"{name} changes parameters, and would not reach their master copies; leave "
            "master_weights, comm_dtype and update_on='host' out, or use gather='gradients' with "
            "comm_dtype",
            code="mode-not-served",
        )
    whole = gather_state(world, built.updates)
    names = built.spec.names
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
