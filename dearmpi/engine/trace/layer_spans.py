"""Layers, the modules of a model that own parameters, as torch's profiler and spans show them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from dearmpi.engine.trace.spans import Spans, profiled
from dearmpi.span import Span, Track
from dearmpi.torch_internals import at_end_of_backprop, is_profiling, parameter_table
from dearmpi.tune.layer_passes import OwnHook


@dataclass(frozen=True, slots=True)
class Layer:
    """A module that owns parameters. params: those that get gradients and no other layer has."""

    name: str
    module: nn.Module
    params: tuple[nn.Parameter, ...]


def find_layers(model: nn.Module) -> Iterator[Layer]:
    """The layers of ``model``; tied parameters count with the first that has them, and scripts,
    which take no hooks, with none.
    """
    seen: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        own = [param for param in parameter_table(module).values() if param is not None]
        if own and not isinstance(module, torch.jit.ScriptModule):
            fresh = [param for param in own if param.requires_grad and param not in seen]
            yield Layer(name or type(module).__name__, module, tuple(dict.fromkeys(fresh)))
        seen.update(own)


def node_behind(values: Any) -> Node | None:
    """What made the first of the tensors in a module's input or output that has a graph."""
    if isinstance(values, Tensor):
        return values.grad_fn
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return None
    nodes = map(node_behind, values)
    return next((node for node in nodes if node is not None), None)


class LayerRanges:
    """Attached to ``model`` while torch's profiler is on, and costs nothing while it is not.

    Ranges of the profiler must nest, and autograd puts one around each of its operations. So the
    range of a layer's backprop is that of the operation behind its output: for a layer of one
    operation all of it, for others the first.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._open: list[tuple[str, AbstractContextManager[object]]] = []
        self._hooked: Node | None = None

    def follow(self) -> None:
        """Attach if the profiler was turned on, detach if it was turned off: ask between passes."""
        if is_profiling() is bool(self._handles):
            return
        if self._handles:
            self.remove()
            return
        for layer in find_layers(self._model):
            enter, leave = self._translate(layer.name)
            self._handles.append(layer.module.register_forward_pre_hook(enter))
            self._handles.append(layer.module.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        """Detach from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _translate(
        self, name: str
    ) -> tuple[Callable[[nn.Module, Any], None], Callable[[nn.Module, Any, Any], None]]:
        def enter(_: nn.Module, __: Any) -> None:
            if not torch.compiler.is_compiling():
                self._begin(f"F {name}")

        def leave(_: nn.Module, inputs: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            self._end(f"F {name}")
            node = node_behind(output)
            # What a layer passes on untouched belongs to the layer before it, or within it.
            if node is not None and node not in (node_behind(inputs), self._hooked):
                node.register_prehook(lambda _: self._begin(f"B {name}"))
                node.register_hook(lambda *_: self._end(f"B {name}"))
            self._hooked = node if self._open else None  # for long it would keep the graph alive

        return enter, leave

    def _begin(self, name: str) -> None:
        opened = profiled(name)
        opened.__enter__()
        self._open.append((name, opened))

    def _end(self, name: str) -> None:
        """End ``name``, and what failed within it; nothing if it never began."""
        while any(begun == name for begun, _ in self._open):
            begun, opened = self._open.pop()
            opened.__exit__(None, None, None)
            if begun == name:
                return


Edge = tuple[str, float]
"""What began or ended, and when, on the clock of ``time.perf_counter``."""


class LayerSpans:
    """Tells ``spans`` of the feed-forward and backprop of each layer of ``model``.

    A layer is a module that owns parameters. Its feed-forward is taken without the wait for its
    parameters. Its backprop ends with the gradient of its first parameter, which is the last to
    come in torch's layers. It begins where that of the layer before it in backprop ended; the first
    one's begins where autograd comes to what the model put out. So what lies between layers counts
    with one of them. So does a layer whose parameters are all frozen, or tied to those of an
    earlier one. Feed-forwards without gradients, and those that fail, are left out; on a device the
    times are those of the host.

    Gradients are watched, not outputs, since the engine's own hooks run at the same moments: what
    costs is to come back to Python after a large operation, not what is done there. For the same
    reason all spans are reported at the end of backprop.
    """

    def __init__(self, model: nn.Module, spans: Spans) -> None:
        """Attach to ``model``."""
        self._spans = spans
        self._handles: list[RemovableHandle] = []
        self._running: list[Edge] = []
        self._over: list[tuple[str, float, float]] = []
        self._begun_s: float | None = None
        self._gradients: list[Edge] = []
        for layer in find_layers(model):
            self._attach(layer)
        self._handles.append(model.register_forward_pre_hook(OwnHook(self._enter_model)))
        self._handles.append(model.register_forward_hook(OwnHook(self._leave_model)))

    def remove(self) -> None:
        """Detach from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._end_backprop()

    def _attach(self, layer: Layer) -> None:
        enter, leave = self._translate_forward(f"F {layer.name}")
        self._handles.append(layer.module.register_forward_pre_hook(OwnHook(enter)))
        self._handles.append(layer.module.register_forward_hook(OwnHook(leave)))
        hook = self._translate_gradient(f"B {layer.name}")
        for param in layer.params[:1]:
            self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def _translate_forward(
        self, name: str
    ) -> tuple[Callable[[nn.Module, Any], None], Callable[[nn.Module, Any, Any], None]]:
        """The hooks before and after a layer's feed-forward; closures, which are called fastest."""
        running, over = self._running, self._over
        is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled

        def enter(_: nn.Module, __: Any) -> None:
            if is_grad_enabled() and not is_compiling():
                running.append((name, perf_counter()))

        def leave(_: nn.Module, __: Any, ___: Any) -> None:
            if is_compiling() or not running:
                return
            stop_s = perf_counter()
            if running[-1][0] is not name and not _drop_failed(running, name):
                return
            over.append((*running.pop(), stop_s))

        return enter, leave

    def _translate_gradient(self, name: str) -> Callable[[Any], None]:
        """The hook after one of a layer's gradients is there."""
        gradients = self._gradients

        def ready(_: Any) -> None:
            if not gradients:
                at_end_of_backprop(self._end_backprop)
            gradients.append((name, perf_counter()))

        return ready

    def _enter_model(self, _: nn.Module, __: Any) -> None:
        self._gradients.clear()  # of a backprop that failed
        self._begun_s = None  # by torch.autograd.grad

    def _leave_model(self, _: nn.Module, __: Any, output: Any) -> None:
        node = None if torch.compiler.is_compiling() else node_behind(output)
        if node is not None:
            node.register_prehook(self._begin_backprop)

    def _begin_backprop(self, _: Any) -> None:
        if self._begun_s is None:  # the model may have run several times
            self._begun_s = perf_counter()

    def _end_backprop(self) -> None:
        """Backprop is over: report all layers that were computed."""
        self._over += self._backprops()
        recorder, iteration = self._spans.recorder, self._spans.iteration
        if recorder is not None:
            for span in self._over:
                recorder.add(Span(Track.COMPUTE, *span, iteration))
        self._over.clear()
        self._gradients.clear()
        self._running.clear()  # what is left has failed
        self._begun_s = None

    def _backprops(self) -> Iterator[tuple[str, float, float]]:
        """The layers between whose gradients no other layer's came."""
        if not self._gradients:
            return
        start_s = self._begun_s
        if start_s is None:  # the model was not called as a whole
            first_s = self._gradients[0][1]
            start_s = max((s for *_, s in self._over if s <= first_s), default=first_s)
        for name, group in groupby(self._gradients, key=lambda edge: edge[0]):
            *_, (_, stop_s) = group
            yield name, start_s, stop_s
            start_s = stop_s


def _drop_failed(running: list[Edge], name: str) -> bool:
    """Take off what lies above ``name``, since it failed; False if ``name`` never began."""
    places = [place for place, edge in enumerate(running) if edge[0] is name]
    if places:
        del running[places[-1] + 1 :]
    return bool(places)
