"""Layer spans: which layer computes when, in feed-forward and backprop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dearmpi.engine.trace.layers import Layer, find_layers, node_behind
from dearmpi.engine.trace.span import Span, Track
from dearmpi.engine.trace.spans import Spans
from dearmpi.torch_internals import at_end_of_backprop
from dearmpi.tune.own_hook import OwnHook

Edge = tuple[str, float]
"""What began or ended, and when, on the clock of ``time.perf_counter``."""


class LayerSpans:
    """Tells ``spans`` of the feed-forward and backprop of each layer of ``model``.

    A layer is a module that owns parameters. Its feed-forward is taken without the wait for its
    parameters. Its backprop ends with the gradient of its first parameter, which is the last to
    come in torch's layers, and begins where that of the layer before it in backprop ended, the
    first one's where autograd comes to what the model put out. So what lies between layers counts
    with one of them, and so does a layer whose parameters are all frozen, or tied to those of an
    earlier one. Feed-forwards without gradients, and those that fail, are not told; on a device the
    times are those of the host.

    Gradients are watched, not outputs, since the engine's own hooks run at the same moments: what
    costs is to come back to Python after a large operation, not what is done there. For the same
    reason all spans are told at the end of backprop.
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
        """Backprop is over: tell of all layers that were computed."""
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
