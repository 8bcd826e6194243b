"""Layer spans: which layer computes when, in feed-forward and backprop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from dearmpi.engine.span import Lane, Span
from dearmpi.engine.spans import Spans

Edge = tuple[str, float]
"""What began, and when, on the clock of ``time.perf_counter``."""


class LayerSpans:
    """Tells ``spans`` of the feed-forward and backprop of each layer of ``model``.

    A layer is a module that owns parameters. Its feed-forward is taken without the wait for its
    parameters. Its backprop begins where autograd comes to what it put out and lasts until that of
    the next layer begins, so what lies between layers counts with the one after it in the model.
    Feed-forwards without gradients, and those that fail, are not told; on a device the times are
    those of the host. All are told at the end of backprop: between two layers every microsecond
    is the training's.
    """

    def __init__(self, model: nn.Module, spans: Spans) -> None:
        """Attach to ``model``."""
        self._spans = spans
        self._handles: list[RemovableHandle] = []
        self._running: list[Edge] = []
        self._backprop: Edge | None = None
        self._over: list[tuple[str, float, float, int]] = []
        self._hooked: Node | None = None
        for name, module in model.named_modules():
            if module._parameters:
                enter, leave = self._translate(name or type(module).__name__)
                self._handles.append(module.register_forward_pre_hook(enter))
                self._handles.append(module.register_forward_hook(leave))

    def remove(self) -> None:
        """Detach from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._end_backprop()

    def _translate(
        self, name: str
    ) -> tuple[Callable[[nn.Module, Any], None], Callable[[nn.Module, Any, Any], None]]:
        """The hooks before and after a layer's feed-forward; closures, which are called fastest."""
        forward, backward = f"F {name}", f"B {name}"
        running, over, spans = self._running, self._over, self._spans

        def enter_backprop(_: Any) -> None:
            now_s = perf_counter()
            ended, self._backprop = self._backprop, (backward, now_s)
            if ended is None:
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._end_backprop)
            else:
                over.append((*ended, now_s, spans.iteration))

        def enter(_: nn.Module, __: Any) -> None:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                running.append((forward, perf_counter()))

        def leave(_: nn.Module, inputs: Any, output: Any) -> None:
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return
            stop_s = perf_counter()
            while running:
                begun = running.pop()
                if begun[0] is forward:  # above it lie those that failed
                    over.append((*begun, stop_s, spans.iteration))
                    break
            node = _node_behind(output)
            # What a layer passes on untouched belongs to the layer before it.
            if node is not None and node is not self._hooked and node is not _node_behind(inputs):
                node.register_prehook(enter_backprop)
            self._hooked = node if running else None  # for long it would keep the graph alive

        return enter, leave

    def _end_backprop(self) -> None:
        """The backprop of the last layer is over: tell of all that were."""
        if self._backprop is not None:
            self._over.append((*self._backprop, perf_counter(), self._spans.iteration))
            self._backprop = None
        recorder = self._spans.recorder
        if recorder is not None:
            for span in self._over:
                recorder.add(Span(Lane.COMPUTE, *span))
        self._over.clear()
        self._running.clear()  # what is left has failed


def _node_behind(values: Any) -> Node | None:
    """What made the first of the tensors in a module's input or output that has a graph."""
    if isinstance(values, Tensor):
        return values.grad_fn
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return None
    for part in values:  # no generator: this runs between layers
        node = part.grad_fn if isinstance(part, Tensor) else _node_behind(part)
        if node is not None:
            return node
    return None
