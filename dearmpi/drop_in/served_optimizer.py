"""ServedOptimizer: an engine takes the steps of an optimizer that a script goes on to use.

``KnownOptimizers`` has all wrappers and optimizers of this process, and which belong together.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.optim import Optimizer

from dearmpi import DistributedOptimizer, World
from dearmpi.drop_in.pending_parameters import PendingParameters
from dearmpi.torch_internals import STEPPED_MARK, call_with_step_hooks, mark_scheduled

if TYPE_CHECKING:
    from weakref import ReferenceType

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
        return cls.models_with(params_of(optimizer))

    @classmethod
    def models_with(cls, params: Iterable[nn.Parameter]) -> list[ModelServing]:
        """The wrappers that have some of ``params``, in the order of these."""
        owners = {p: model for model in cls.models for p in model.names}
        return list(dict.fromkeys(owners[p] for p in params if p in owners))


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


class ServedOptimizer:
    """The engine behind an optimizer of the script's, whose class and param groups stay.

    The engine wraps a twin that shares all but the state; in place of that the script sees the
    engine's.
    """

    def __init__(self, optimizer: Optimizer, models: list[ModelServing], world: World) -> None:
        """Raises ConfigError, with everything as it was, for what no engine can serve."""
        self.optimizer, self.models = optimizer, models
        self._unsynchronized, self._num_unsynchronized = ExitStack(), 0
        self._twin = _twin_of(optimizer)
        KnownOptimizers.own.add(self._twin)
        whole = [serving.model for serving in models]
        self._module = whole[0] if len(whole) == 1 else nn.ModuleList(whole)
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(model.own_buffers())
            # Other models may look alike, whose ranks it would join.
            labels = " and ".join(model.label for model in models)
            stack.enter_context(world.named_call(f"the first use of the optimizer of {labels}"))
            self.engine = DistributedOptimizer(
                self._twin, self._module, world=world, **models[0].settings()
            )
        if self.engine.config.gather == "gradients":
            for model in models:
                model.keep_gradients(self.engine)
        self.pending = PendingParameters(params_of(optimizer), self.engine.synchronize)
        self._show_state()
        self._before = vars(optimizer).get("step")
        vars(optimizer)["step"] = MethodType(
            mark_scheduled(call_with_step_hooks(self._step)), optimizer
        )
        vars(optimizer)["add_param_group"] = MethodType(self._add_param_group, optimizer)
        vars(optimizer)["state_dict"] = MethodType(self._state_dict, optimizer)
        self._handle = optimizer.register_load_state_dict_post_hook(self._loaded)

    def params(self) -> Iterable[nn.Parameter]:
        """Those of the optimizer."""
        return params_of(self.optimizer)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients stay local as long as one of its models has them do so, whichever began."""
        if not self._num_unsynchronized:
            self._unsynchronized.enter_context(self.engine.no_sync())
        self._num_unsynchronized += 1
        try:
            yield
        finally:
            self._num_unsynchronized -= 1
            if not self._num_unsynchronized:
                self._unsynchronized.close()

    def release(self) -> None:
        """Leave the optimizer, with its state and gradients, to itself (collective)."""
        optimizer = self.optimizer
        self.pending.unmark()
        is_sharded = self.engine.config.gather == "parameters"
        state_dict = self.engine.state_dict() if is_sharded else None
        gradients = self.engine.gradients() if is_sharded else {}
        self._handle.remove()
        for model in self.models:
            model.stop_averager()
            model.engines.remove(self)
        self.engine.close()
        vars(optimizer)["state"] = self._twin.state
        for name in _METHODS:
            del vars(optimizer)[name]
        if self._before is not None:
            vars(optimizer)["step"] = self._before
        if state_dict is not None:
            optimizer.load_state_dict(state_dict)
        for name, gradient in gradients.items():
            self._module.get_parameter(name).grad = gradient
        KnownOptimizers.served.pop(optimizer, None)

    def _step(self, _: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if self._is_left_out():
            return None
        if vars(self.optimizer)["state"] is not self._shown:  # the script has set another
            self._loaded(self.optimizer)
        self._follow_attributes()
        self.pending.unmark()
        for model in self.models:
            model.take_moved()
        vars(self.optimizer)[STEPPED_MARK] = True
        was_choosing = self.engine.is_choosing
        loss = self.engine.step(closure)
        for model in self.models:
            model.note_step(self.engine)
        if was_choosing and not self.engine.is_choosing:  # buckets of another codec lie elsewhere
            for model in self.models:
                model.note_storage()
        self.pending.mark()
        return loss

    def _is_left_out(self) -> bool:
        """Whether a GradScaler has found infinities; else gradients are unscaled.

        It leaves both to a fused optimizer, which finds what to do in two attributes.
        """
        own = vars(self.optimizer)
        if "found_inf" not in own or "grad_scale" not in own:
            return False
        if float(own["found_inf"]):  # of averaged gradients, so on all ranks alike
            return True
        if own["grad_scale"] is not None:  # else they are unscaled
            self.engine.scale_gradients_(1.0 / float(own["grad_scale"]))
        return False

    def _follow_attributes(self) -> None:
        """What the script has set on the optimizer, the engine refuses where it has no effect."""
        own, twin = vars(self.optimizer), vars(self._twin)
        for name, value in own.items():
            if name not in _INSTEAD and "hooks" not in name and twin.get(name, self) is not value:
                twin[name] = value

    def _add_param_group(self, optimizer: Optimizer, param_group: dict[str, Any]) -> None:
        self.release()  # which takes this method away
        optimizer.add_param_group(param_group)

    def _state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """torch's own, with its hooks, of plain entries, which can be saved."""
        shown = vars(optimizer)["state"]
        vars(optimizer)["state"] = {param: dict(entries) for param, entries in shown.items()}
        try:
            return type(optimizer).state_dict(optimizer)
        finally:
            vars(optimizer)["state"] = shown

    def _loaded(self, optimizer: Optimizer) -> None:
        vars(self._twin)["param_groups"] = optimizer.param_groups
        self.engine.load_state_dict(self._state_dict(optimizer))
        vars(optimizer)["param_groups"] = self._twin.param_groups
        self._show_state()

    def _show_state(self) -> None:
        vars(self.optimizer)["state"] = self._shown = self.engine.state


_METHODS = ("step", "add_param_group", "state_dict")
_SCALING = frozenset(("grad_scale", "found_inf"))  # of a step by torch's GradScaler
_INSTEAD = frozenset((*_METHODS, *_SCALING, "state"))


def _twin_of(optimizer: Optimizer) -> Optimizer:
    """One of the same class, with the same attributes, param groups and state, but no hooks."""
    twin: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name in _SCALING:
            continue
        is_hooks = isinstance(value, OrderedDict) and "hooks" in name
        vars(twin)[name] = OrderedDict() if is_hooks else value
    return twin
