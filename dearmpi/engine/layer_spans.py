"""Layer spans: which layer computes when, in feed-forward and backprop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from dearmpi.engine.span import Lane, Span
from dearmpi.engine.spans import Spans


class LayerSpans:
    """Tells ``spans`` of the feed-forward and backprop of each layer of ``model``.

    A layer is a module that owns parameters or has no modules inside. Its feed-forward is told as
    it runs, without the wait for its parameters. Its backprop begins where autograd comes to what
    it put out and lasts until that of the next layer begins, so what lies between layers counts
    with the one after it in the model. Feed-forwards without gradients are not told, and on a
    device the times are those of the host.
    """

    def __init__(self, model: nn.Module, spans: Spans) -> None:
        """Attach to ``model``."""
        self._spans = spans
        self._handles: list[RemovableHandle] = []
        self._running: list[tuple[str, float]] = []
        self._backprop: tuple[str, float] | None = None
        self._hooked: Node | None = None
        for name, module in model.named_modules():
            if module._parameters or not module._modules:
                self._watch(name or type(module).__name__, module)

    def remove(self) -> None:
        """Detach from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._end_backprop()

    def _watch(self, name: str, module: nn.Module) -> None:
        self._handles += [
            module.register_forward_pre_hook(partial(self._enter, f"F {name}")),
            module.register_forward_hook(partial(self._leave, f"B {name}"), always_call=True),
        ]

    def _enter(self, name: str, *_: Any) -> None:
        """A layer's feed-forward begins."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._running.append((name, time.perf_counter()))

    def _leave(self, backprop: str, _: nn.Module, inputs: Any, output: Any) -> None:
        """It is over, or has failed."""
        if torch.compiler.is_compiling() or not self._running or not torch.is_grad_enabled():
            return
        self._tell(*self._running.pop())
        node = _node_behind(output)
        # What a layer passes on untouched belongs to the layer before it.
        if node is not None and node is not self._hooked and node is not _node_behind(inputs):
            node.register_prehook(partial(self._enter_backprop, backprop))
        self._hooked = node if self._running else None  # for long it would keep the graph alive

    def _enter_backprop(self, name: str, _: Any) -> None:
        """Autograd has come to what a layer put out."""
        began = self._backprop is None
        self._end_backprop()
        self._backprop = (name, time.perf_counter())
        if began:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backprop)

    def _end_backprop(self) -> None:
        """The backprop of the layer that is under way is over."""
        if self._backprop is not None:
            self._tell(*self._backprop)
            self._backprop = None

    def _tell(self, name: str, start_s: float) -> None:
        recorder = self._spans.recorder
        if recorder is not None:
            stop_s = time.perf_counter()
            recorder.add(Span(Lane.COMPUTE, name, start_s, stop_s, self._spans.iteration))


def _node_behind(values: Any) -> Node | None:
    """What made the first of the tensors in a module's input or output that has a graph."""
    if isinstance(values, Tensor):
        return values.grad_fn
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return None
    return next((node for part in values if (node := _node_behind(part)) is not None), None)
