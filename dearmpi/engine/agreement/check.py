"""Checks for finding mistakes: ``DEAR_CHECK=1``, or ``check_every=K``. They cost time.

- From the step on, shards that other ranks are still to send are filled with NaN, so that whoever
  reads them too early, through a reference that does not wait, notices. The module that did is
  named. Where gradients are gathered, each rank updates all there is, and nothing is filled.
- What every Kth step has led to is compared with the other ranks: see ``replicas``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from dearmpi.engine.bucket.bucket import BucketRuntime
from dearmpi.errors import ConfigError, UsageError
from dearmpi.tune.own_hook import OwnHook


def steps_between_checks(setting: int | None) -> int:
    """The setting, or DEAR_CHECK where there is none; 0: no checks."""
    if setting is not None:
        return setting
    text = os.environ.get("DEAR_CHECK", "0")
    if not text.isdigit():
        raise ConfigError(
            f"DEAR_CHECK is {text!r}; give the steps between checks, 0 for none", code="wrong-type"
        )
    return int(text)


class Checks:
    """What is checked in each forward while a model trains."""

    def __init__(self, model: nn.Module, buckets: Sequence[BucketRuntime]) -> None:
        self._buckets = tuple(buckets)
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(OwnHook(self._name_early_reader(name, module)))
            for name, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)  # which takes no hooks
        ]

    def remove(self) -> None:
        """Detach from the model."""
        for handle in self._handles:
            handle.remove()

    def _name_early_reader(self, name: str, module: nn.Module) -> Any:
        name = name or type(module).__name__

        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if is_dynamo_compiling():  # the graph would hold only while nothing is pending
                return
            pending = [bucket for bucket in self._buckets if bucket.pending]
            if pending and any(_has_nan(tensor) for tensor in _tensors(output)):
                names = [name for bucket in pending for name in bucket.spec.names]
                raise UsageError(
                    f"module {name} computed NaN while {len(names)} parameters were under way "
                    f"({', '.join(names[:4])} ...): it seems to read one through a reference that "
                    "does not wait; read it as an attribute of its module, or call "
                    "optimizer.synchronize() first",
                    code="read-of-stale-parameter",
                )

        return hook


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(torch.isnan(tensor).any())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    return []
