"""The wrapped optimizer's state while an engine's updates hold it.

Updates take over the state that the optimizer has, each rank its part. ``pack`` shows it in plain
torch form. The optimizer gets it back where every rank has all of it. ``switch`` calls
``train()`` or ``eval()`` of an optimizer that has them, such as a schedule-free one. They move
parameters between two points by the state. The param groups note which point is current.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dearmpi.comm.world import World
from dearmpi.engine.probe.probe import elementwise_keys, host_twin
from dearmpi.engine.probe.steadiness import changed_option
from dearmpi.engine.state.options import describe_options, describe_state
from dearmpi.engine.state.owned_state import own_states
from dearmpi.engine.state.sharded_state import (
    LocalState,
    gather_state,
    load_state,
    read_pieces,
    read_whole,
)
from dearmpi.engine.update.master import MASTER, OWED, dtype_of_copy, is_half
from dearmpi.engine.update.shard_update import UpdateSet
from dearmpi.engine.update.update import clone, is_changed_by, read_options
from dearmpi.errors import UsageError

MODES = frozenset(("train", "eval"))


# By an optimizer whose state was left in shards: what takes the hook on its next step away.
_LEFT_IN_SHARDS: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()


class HeldState(defaultdict[Any, Any]):
    """The optimizer's own state while updates hold that of its parameters: copies are plain ones.

    Raises UsageError where a parameter's entries are read, which would be created empty.
    """

    def __missing__(self, key: Any) -> Any:
        if not isinstance(key, Tensor):
            return super().__missing__(key)
        raise UsageError(
            "state of the wrapped optimizer has no entries of a parameter while its "
            "DistributedOptimizer trains, whose buckets hold them; read state of the "
            "DistributedOptimizer, on every rank",
            code="saved-without-state",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,), None, None, iter(self.items())


def show_held(optimizer: Optimizer, *, is_held: bool) -> None:
    """Have ``optimizer.state`` be one that says who holds it, or a plain one again."""
    state = optimizer.state
    if is_held is not isinstance(state, HeldState):
        vars(optimizer)["state"] = (HeldState if is_held else defaultdict)(dict, state)


def warn_of_state_in_shards(optimizer: Optimizer) -> None:
    """Warn where ``optimizer`` begins anew, because its state was left with a closed engine."""
    handle = _LEFT_IN_SHARDS.pop(optimizer, None)
    if handle is None:
        return
    handle.remove()
    if not any(optimizer.state.values()):
        warnings.warn(
            f"this {type(optimizer).__name__} begins without its state, which a "
            "DistributedOptimizer that is closed holds in shards; to go on with the state, give "
            "it to load_state_dict(), from the closed one's state_dict() on every rank",
            stacklevel=3,
        )


def _step_alone(optimizer: Optimizer, _: Any, __: Any) -> None:
    warn_of_state_in_shards(optimizer)


# Those whose own state dict is being read for an engine, which adds what the updates hold.
_READ_FOR_ENGINE: WeakSet[Optimizer] = WeakSet()


def _own_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    _READ_FOR_ENGINE.add(optimizer)
    try:
        return optimizer.state_dict()
    finally:
        _READ_FOR_ENGINE.discard(optimizer)


def has_mode(optimizer: Optimizer, mode: str) -> bool:
    """Whether ``optimizer`` has a method called ``mode``, of those above."""
    return mode in MODES and callable(getattr(type(optimizer), mode, None))


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The state of ``optimizer``, which ``updates`` hold, if there are any.

    names: the parameters under the optimizer.
    """

    optimizer: Optimizer
    names: Mapping[nn.Parameter, str]
    updates: UpdateSet = UpdateSet()

    @property
    def is_held(self) -> bool:
        """Whether the updates hold it, and not the optimizer itself."""
        return bool(self.updates.of_buckets)

    def adopt(self) -> None:
        """Have the updates take the state that the optimizer has.

        What it has kept for parameters of half precision becomes as wide as the masters that it is
        to work with from now on.
        """
        if self.updates.masters.weights:
            for param in filter(is_half, self.names):
                entries = self.optimizer.state.get(param, {})
                if MASTER not in entries:
                    entries.update({k: _widen(v, param) for k, v in entries.items()})
        self._hand_over()

    def take_over(self, state_dict: dict[str, Any]) -> list[str]:
        """Take over options and state in plain torch form, whole and the same on every rank; all
        stays as it is where the state does not fit. Returns what ranks are to compare.
        """
        optimizer = self.optimizer
        groups, state = optimizer.param_groups, optimizer.state
        try:
            self._load(state_dict)
            lines = [*describe_options(optimizer), *describe_state(optimizer, self.names)]
            self._hand_over()
        except Exception:
            optimizer.param_groups, optimizer.state = groups, state
            raise
        return lines

    def clear(self) -> list[str]:
        """Begin anew, with the same options. Returns what ranks are to compare."""
        self.optimizer.state.clear()
        self._hand_over()
        return [*describe_options(self.optimizer), *describe_state(self.optimizer, self.names)]

    def pack(self, world: World) -> dict[str, Any]:
        """Options and state in plain torch form, whole on every rank (collective)."""
        packed = _own_state_dict(self.optimizer)
        if self.is_held:
            whole = gather_state(world, self.updates.of_buckets)
            packed["state"] |= {  # which has that of parameters without elements
                index: whole[self.names[param]]
                for index, param in enumerate(self._numbered_params())
                if param in self.names and _tells(whole.get(self.names[param]))
            }
        return packed

    def by_param(self, state_dict: dict[str, Any]) -> dict[Tensor, Any]:
        """The state of ``state_dict``, which is in plain torch form, by parameter."""
        params = self._numbered_params()
        return {params[index]: entries for index, entries in state_dict["state"].items()}

    def refuse_own_state_dict(self, holds: Callable[[], bool]) -> None:
        """Have the optimizer's own ``state_dict()`` raise UsageError from now on while ``holds()``:
        it lacks the state that updates hold.
        """

        def refuse(optimizer: Optimizer) -> None:
            if optimizer not in _READ_FOR_ENGINE and holds():
                raise UsageError(
                    f"state_dict() of the wrapped {type(optimizer).__name__} has no state while "
                    "its DistributedOptimizer trains, whose buckets hold it; call state_dict() "
                    "of the DistributedOptimizer, on every rank",
                    code="saved-without-state",
                )

        self.optimizer.register_state_dict_pre_hook(refuse)

    def local(self) -> LocalState:
        """What this rank holds; its tensors are those that the next step changes."""
        packed = _own_state_dict(self.optimizer)
        whole = read_whole(self.updates.of_buckets)
        if not self.is_held:
            held = ((name, self.optimizer.state.get(param)) for param, name in self.names.items())
            whole = {name: dict(entries) for name, entries in held if entries}
        updates = self.updates
        pieces, owned = read_pieces(updates.shards), own_states(updates.owned)
        return LocalState(packed["param_groups"], whole, pieces, owned)

    def hand_back(self) -> bool:
        """Give the optimizer its state back; False where it alone could not go on with it."""
        if self.updates.masters.weights or self.updates.is_divided:
            has_state = read_pieces(self.updates.shards) or own_states(self.updates.owned)
            if has_state and self.optimizer not in _LEFT_IN_SHARDS:
                _LEFT_IN_SHARDS[self.optimizer] = self.optimizer.register_step_pre_hook(_step_alone)
            return False
        states = read_whole(self.updates.of_buckets)
        lost = [name for name, entries in states.items() if entries.pop(OWED, None) is not None]
        for param, name in self.names.items():
            if states.get(name):
                self.optimizer.state[param] = states[name]
        _warn_of_lost(lost)
        return True

    def describe_options(self) -> str:
        """The options, as text that ranks compare."""
        return repr(describe_options(self.optimizer))

    def is_in_mode(self, mode: str) -> bool:
        """Whether the param groups show that a call of ``mode`` has nothing to do."""
        optimizer, (other,) = self.optimizer, MODES - {mode}
        if not has_mode(optimizer, other):
            return False
        now = read_options(optimizer)
        groups = [{**group, "params": []} for group in now]
        twin = clone(optimizer, groups, defaultdict(dict))
        getattr(type(optimizer), mode)(twin)
        in_mode = read_options(twin)
        getattr(type(optimizer), other)(twin)
        is_noted = all(map(changed_option, read_options(twin), in_mode))
        return is_noted and not any(map(changed_option, now, in_mode))

    def switch(self, world: World, mode: str) -> None:
        """Have the optimizer change parameters and param groups by its ``train()`` or ``eval()``,
        on every rank with the whole state (collective).

        Raises UsageError for a method that changes the state as well, and where parameters have
        master copies, which it would not reach.
        """
        optimizer, masters = self.optimizer, self.updates.masters
        act: Any = getattr(type(optimizer), mode)
        if not self.is_held:
            act(optimizer)
            return
        name = f"{type(optimizer).__name__}.{mode}()"
        if masters.weights or masters.is_for_wide:
            raise UsageError(
                f"{name} changes parameters, and would not reach their master copies; leave "
                "master_weights, comm_dtype, compress and update_on='host' out, or use "
                "gather='gradients' with comm_dtype or compress",
                code="mode-not-served",
            )
        whole = gather_state(world, self.updates.of_buckets)
        state = {param: whole[name] for param, name in self.names.items() if whole.get(name)}
        held = [v for entries in state.values() for v in entries.values() if isinstance(v, Tensor)]
        twin = clone(optimizer, optimizer.param_groups, defaultdict(dict, state))
        if is_changed_by(lambda: act(twin), held):
            raise UsageError(
                f"{name} changes the optimizer's state, which lies in the buckets' updates and "
                "stays as it was; train without dearmpi, or with a method that changes parameters "
                "alone",
                code="mode-not-served",
            )

    def _hand_over(self) -> None:
        state, updates, lost = self.optimizer.state, self.updates, list[str]()
        with torch.no_grad():
            for param, name in self.names.items():
                if param in state:
                    updates.masters.settle(param.detach(), state[param], name)
                    if not updates.of_buckets and OWED in state[param]:
                        lost.append(name)
                        del state[param][OWED]
        _warn_of_lost(lost)
        if self.is_held:
            states = {n: dict(state[p]) for p, n in self.names.items() if p in state}
            tried = host_twin(self.optimizer) if updates.on_host else self.optimizer
            elementwise = elementwise_keys(tried, whole=bool(updates.owned) or not updates.shards)
            with updates.comm_stream.section():
                load_state(updates.of_buckets, states, elementwise=elementwise)
            for param in self.names:
                state.pop(param, None)

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Of a parameter that has not stepped there may be what is owed and nothing else, at which
        optimizers of torch take offence: they look for their own entries.
        """
        state = state_dict["state"]
        owed = {index: entries for index, entries in state.items() if set(entries) == {OWED}}
        known = {index: entries for index, entries in state.items() if index not in owed}
        self._load_known({**state_dict, "state": known})
        params = self._numbered_params()
        for index, entries in known.items():  # torch makes a generator's name of each text
            if texts := {key: value for key, value in entries.items() if isinstance(value, str)}:
                self.optimizer.state[params[index]].update(texts)
        self.optimizer.state.update(
            {params[index]: entries for index, entries in owed.items() if _tells(entries)}
        )

    def _load_known(self, state_dict: dict[str, Any]) -> None:
        optimizer = self.optimizer
        if not self.updates.masters.weights:
            optimizer.load_state_dict(state_dict)
            return
        # It would round the state to the parameters' dtype, and put all of it beside them.
        replaced = {_stand_in(param): param for param in self._numbered_params()}
        stand_ins = iter(replaced)
        optimizer.param_groups = [
            {**group, "params": [next(stand_ins) for _ in group["params"]]}
            for group in optimizer.param_groups
        ]
        optimizer.load_state_dict(state_dict)
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(param, param) for param in group["params"]]
        loaded = [(replaced.get(p, p), entries) for p, entries in optimizer.state.items()]
        optimizer.state.clear()
        optimizer.state.update(loaded)

    def _numbered_params(self) -> Sequence[nn.Parameter]:
        """By their numbers in a state dict."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]


def _tells(state: Mapping[str, Any] | None) -> bool:
    """Whether a parameter's ``state`` has more to say than that nothing is owed."""
    if not state:
        return False
    return set(state) != {OWED} or bool(state[OWED].any())


def _widen(value: Any, param: Tensor) -> Any:
    if isinstance(value, Tensor) and is_half(value):
        return value.to(dtype_of_copy(param))
    return value


def _stand_in(param: Tensor) -> Tensor:
    """Something in host memory, of which it takes none, as wide as the master copy of ``param``."""
    return torch.zeros((), dtype=dtype_of_copy(param), device="cpu").expand(param.shape)


def _warn_of_lost(names: Sequence[str]) -> None:
    if names:
        warnings.warn(
            f"the state of {len(names)} parameters, such as {names[0]}, has gradients that ranks "
            "had not sent, as with compress 'powersgd'; they are left out here, since nothing "
            "takes them up on one rank, or after close()",
            stacklevel=3,
        )
