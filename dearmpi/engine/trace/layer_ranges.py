"""Layer ranges: the layers of a model as torch's profiler shows them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from dearmpi.engine.trace.layers import find_layers, node_behind
from dearmpi.engine.trace.spans import profiled
from dearmpi.torch_internals import is_profiling


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
