"""Hooks: torch's events, translated into the engine's moments. No logic of their own.

A module's pre-forward hook makes it wait for the parameters it owns. Parameters are also used
without their module being called: by a parent (``nn.MultiheadAttention`` reads
``out_proj.weight``), through a tied weight, by ``state_dict()``. All of these look the parameter up
in its module's table, so the table waits too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ReferenceType, finalize, ref

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from dearmpi.engine import usage_errors
from dearmpi.engine.agreement.replicas import Checks
from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.engine.bucket.grad_tracker import GradState
from dearmpi.engine.iteration.compilation import (
    CompilationWatch,
    CompiledRoots,
    buckets_by_module,
    run_as_it_is,
    untraced,
)
from dearmpi.engine.iteration.engine import Engine
from dearmpi.engine.sync.refused_models import (
    WrapperWatch,
    refuse_active,
    refuse_replicated,
    refuse_sharded,
)
from dearmpi.torch_internals import (
    TRACES_DICT_METHODS,
    active_ddp,
    at_end_of_backprop,
    forward_pre_hooks,
    number_of_backprop,
    parameter_table,
    replace_parameter_table,
)
from dearmpi.tune.layer_passes import OwnHook

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_values

Place = tuple[BucketRuntime, int]
PreForward = Callable[[Iterable[BucketRuntime]], None]
GradientEvent = Callable[[BucketRuntime, int], None]


class ParameterTable(dict[str, "nn.Parameter | None"]):
    """A module's ``_parameters``: looking a parameter up waits until it is current.

    Several engines may watch different parameters of one module.
    """

    def __init__(self, table: Mapping[str, nn.Parameter | None]) -> None:
        super().__init__(table)
        self._watched: dict[str, tuple[BucketRuntime, PreForward]] = {}
        self._wrappers: dict[str, WrapperWatch] = {}

    def watch(
        self, name: str, bucket: BucketRuntime, pre_forward: PreForward, wrappers: WrapperWatch
    ) -> None:
        """Wait for ``bucket`` before ``name`` is handed out; ``wrappers`` hears of reads of all."""
        self._watched[name] = (bucket, pre_forward)
        self._wrappers[name] = wrappers

    def unwatch(self, name: str) -> bool:
        """Hand ``name`` out at once again; True if nothing is left to watch."""
        self._watched.pop(name, None)
        self._wrappers.pop(name, None)
        return not self._watched

    if TRACES_DICT_METHODS:

        def __getitem__(self, name: str) -> nn.Parameter | None:
            self._wait(name)
            return dict.__getitem__(self, name)  # in half the time of super(), for each forward
    else:

        def __getitem__(self, name: str) -> nn.Parameter | None:
            self._wait(name)
            return super().__getitem__(name)

    def __delitem__(self, name: str) -> None:
        """Another module may have it from now on, as where a parametrization is put on."""
        self._wait(name)
        if name in self._watched:
            refuse_sharded(self._full_name(name), None)
            self._watched[name][0].unguarded = True
        super().__delitem__(name)

    def __setitem__(self, name: str, param: nn.Parameter | None) -> None:
        """Another parameter, as a script may put there; not one that is spread over ranks."""
        if name in self._watched and param is not None:
            refuse_sharded(self._full_name(name), param)
        super().__setitem__(name, param)

    def get(self, name: str, default: Any = None) -> Any:
        """As ``dict.get``."""
        self._wait(name)
        return super().get(name, default)

    def items(self) -> dict_items[str, nn.Parameter | None]:
        """As ``dict.items``; waits for all."""
        self._wait_all()
        return super().items()

    def values(self) -> dict_values[str, nn.Parameter | None]:
        """As ``dict.values``; waits for all."""
        self._wait_all()
        return super().values()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        return deepcopy(dict(self.items()), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)

    def _full_name(self, name: str) -> str:
        """In the model, of a parameter that is watched and here still."""
        bucket, _ = self._watched[name]
        param = dict.get(self, name)
        places = (slot for slot, other in enumerate(bucket.params) if other is param)
        slot = next(places, None)
        return name if slot is None else bucket.spec.names[slot]

    def _wait(self, name: str) -> None:
        watched = self._watched.get(name)
        if watched is None:
            return
        bucket, pre_forward = watched
        # Where torch traces this nothing is unread, and the graph holds as long as nothing is.
        if bucket.unread or (not is_dynamo_compiling() and bucket.mark is not None):
            pre_forward((bucket,))

    def _wait_all(self) -> None:
        if not is_dynamo_compiling():
            for wrappers in set(self._wrappers.values()):
                wrappers.parameters_read()
        for name in self._watched:
            self._wait(name)


class ModelHooks:
    """Everything that is attached to a model, and how to take it off again."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        """Have ``model`` report to ``engine``."""
        waiting, backprop = engine.waiting, engine.backprop
        pre_forward, buckets = waiting.pre_forward, engine.state.buckets
        places = {
            param: (bucket, slot) for bucket in buckets for slot, param in enumerate(bucket.params)
        }
        self._checks = None if engine.state.replicas is None else Checks(model, buckets)
        self._handles: list[RemovableHandle] = []
        self._ends: list[RemovableHandle] = []  # of what is called once a gradient is there
        self._accumulators: list[Node] = []  # else nothing keeps them, and their hooks, alive
        self._watched: list[tuple[nn.Module, str]] = []
        # Nothing here refers to itself: the buffers would outlive their engine until Python looks.
        reads = buckets_by_module(model, places)
        named = tuple((_name_of(module, read), module) for module, read in reads.items())
        self._wrappers = wrappers = WrapperWatch()
        begin, end = engine.begin_backprop, engine.end_backprop
        backprops = _Backprops(partial(_begin, named, wrappers, begin), end)
        watch_calls = partial(_watch_calls, self._handles, pre_forward, wrappers, waiting.polls)
        self._compilation = CompilationWatch(
            buckets,
            CompiledRoots(model, reads, watch_calls),
            partial(pre_forward, buckets),
            is_driver=waiting.is_driver,
        )
        for param, place in places.items():
            if param.is_floating_point() or param.is_complex():  # integers have no gradients
                self._watch_gradient(
                    param, *_translate_gradient(place, backprops, backprop.register_grad_ready)
                )
        for module, read in reads.items():
            self._watch_table(module, places, pre_forward)
            watch_calls(module, read)
        # Weakly: what refers to the buckets may refer to this.
        self._forgotten = finalize(self, _refuse_backprops, self._ends, [ref(b) for b in buckets])
        self._forgotten.atexit = False

    def stepped(self) -> None:
        """A step was taken."""
        self._compilation.renew()

    def remove(self) -> None:
        """Leave the model as it was."""
        self._compilation.remove()
        if self._checks is not None:
            self._checks.remove()
        self._forgotten.detach()
        for handle in (*self._handles, *self._ends):
            handle.remove()
        for module, name in self._watched:
            table = parameter_table(module)
            if isinstance(table, ParameterTable) and table.unwatch(name):
                replace_parameter_table(module, dict(table))
        self._handles.clear()
        self._ends.clear()
        self._accumulators.clear()
        self._watched.clear()

    def _watch_gradient(
        self,
        param: nn.Parameter,
        before: Callable[[Any], None],
        after: Callable[[Any], None],
    ) -> None:
        required, param.requires_grad = param.requires_grad, True  # torch hooks nothing frozen
        # On the node that accumulates: a hook on the parameter also runs in torch.autograd.grad().
        node = torch.autograd.graph.get_gradient_edge(param).node
        self._accumulators.append(node)
        self._handles.append(node.register_prehook(before))
        self._ends.append(param.register_post_accumulate_grad_hook(after))
        param.requires_grad = required

    def _watch_table(
        self, module: nn.Module, places: Mapping[nn.Parameter, Place], pre_forward: PreForward
    ) -> None:
        table = parameter_table(module)
        if not isinstance(table, ParameterTable):
            table = ParameterTable(table)
            replace_parameter_table(module, table)
        for name, param in dict.items(table):
            if param is not None and param in places:
                table.watch(name, places[param][0], pre_forward, self._wrappers)
                self._watched.append((module, name))


def _refuse_backprops(
    ends: Sequence[RemovableHandle], buckets: Sequence[ReferenceType[BucketRuntime]]
) -> None:
    """Nothing would take a placeholder away before autograd adds to it."""
    for handle in ends:
        handle.remove()
    for bucket in filter(None, (found() for found in buckets)):
        for slot in bucket.kept_slots():
            bucket.params[slot].grad = None
        for param, name in zip(bucket.params, bucket.spec.names, strict=True):
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(_refuse_backprop, name))


def _refuse_backprop(name: str, _: Any) -> NoReturn:
    raise usage_errors.forgotten(name)


def _name_of(module: nn.Module, read: Sequence[BucketRuntime]) -> str:
    """Of ``module``, which has parameters in the buckets that it will ``read``."""
    own = {id(param) for param in dict.values(parameter_table(module))}
    names = (
        bucket.spec.names[slot]
        for bucket in read
        for slot, param in enumerate(bucket.params)
        if id(param) in own
    )
    return next(names, "").rpartition(".")[0]


def _begin(
    modules: Sequence[tuple[str, nn.Module]],
    wrappers: WrapperWatch,
    begin_backprop: Callable[[], None],
) -> None:
    if wrappers.is_on:
        refuse_replicated(modules)
    begin_backprop()


def _watch_calls(
    handles: list[RemovableHandle],
    pre_forward: PreForward,
    wrappers: WrapperWatch,
    polls: bool,
    module: nn.Module,
    read: Sequence[BucketRuntime],
) -> None:
    """Have ``module`` wait for the buckets that it will ``read`` whenever it is called."""
    hook = _PreForward(_name_of(module, read), read, pre_forward, wrappers, polls)
    handles.append(module.register_forward_pre_hook(hook, prepend=True))


class _Backprops:
    """Reports the begin of a backprop, when its first gradient is about to be accumulated, and its
    end. One may run inside another.

    current: its number, as of the last gradient.
    """

    __slots__ = ("_begin", "_end", "_latest", "current")

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end
        self._latest = self.current = -1

    def follow(self, number: int) -> None:
        """A gradient of another one than the ``current`` comes."""
        self.current = number
        at_end_of_backprop(self._end)
        if number > self._latest:
            self._latest = number
            self._begin()


def _translate_gradient(
    place: Place, backprops: _Backprops, register_grad_ready: GradientEvent
) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
    """The hooks before and after autograd accumulates one parameter's gradient. It calls both even
    where there is none, or the parameter was frozen after the feed-forward.

    After a layer's computation all that a hook touches comes from memory, not from a cache: most of
    what it costs. So hardly any of them looks at the parameter.
    """
    bucket, slot = place
    param = bucket.params[slot]
    tracker = bucket.tracker
    states, noted, covered = tracker.states, tracker.noted, tracker.covered
    comes = True

    @untraced
    def before(grads: Any) -> None:
        nonlocal comes
        comes = grads[0] is not None
        number = number_of_backprop()
        if number != backprops.current:
            backprops.follow(number)
        if comes and slot in covered:
            bucket.uncover(slot)

    @untraced
    def after(_: Any) -> None:
        if not comes:
            return
        if states[slot] is GradState.QUIET:
            states[slot] = GradState.NOTED
            noted.append(slot)
        elif param.requires_grad:
            register_grad_ready(bucket, slot)

    return before, after


class _PreForward(OwnHook):
    """Before a module's forward: wait for the buckets that it reads."""

    __slots__ = ("_name", "_num_hooks", "_polls", "_pre_forward", "_read", "_wrappers")

    def __init__(
        self,
        name: str,
        read: Sequence[BucketRuntime],
        pre_forward: PreForward,
        wrappers: WrapperWatch,
        polls: bool,
    ) -> None:
        self._name, self._read, self._pre_forward, self._polls = name, read, pre_forward, polls
        self._wrappers = wrappers
        self._num_hooks = 0  # of the module, when they were last looked at

    @run_as_it_is
    def __call__(self, module: nn.Module, *_: Any) -> None:
        if is_dynamo_compiling():
            return  # in a graph nobody waits: see CompiledRoots
        if self._wrappers.is_on:
            self._refuse_wrappers(module)
        for bucket in self._read:
            if self._polls or bucket.unread or bucket.mark is not None:
                self._pre_forward(self._read)
                return

    def _refuse_wrappers(self, module: nn.Module) -> None:
        if active_ddp() is not None:
            refuse_active(dict.values(parameter_table(module)))
        if (num_hooks := len(forward_pre_hooks(module))) != self._num_hooks:  # replicate() adds one
            self._num_hooks = num_hooks
            refuse_replicated([(self._name, module)])
