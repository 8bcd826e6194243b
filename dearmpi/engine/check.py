"""Checks for finding mistakes: ``DEAR_CHECK=1``, or ``check_every=K``. They cost time.

- From the step on, shards that other ranks are still to send are filled with NaN, so that whoever
  reads them too early, through a reference that does not wait, notices. The module that did is
  named. Where gradients are gathered, each rank updates all there is, and nothing is filled.
- Every K steps all ranks compare hashes of every parameter, and what they have posted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dearmpi.comm.world import World
from dearmpi.engine.bucket import BucketRuntime
from dearmpi.errors import ConfigError, MismatchError, UsageError
from dearmpi.tune.own_hook import OwnHook


def steps_between_checks(setting: int | None) -> int:
    """The setting, or DEAR_CHECK where there is none; 0: no checks."""
    if setting is not None:
        return setting
    text = os.environ.get("DEAR_CHECK", "0")
    if not text.isdigit():
        raise ConfigError(f"DEAR_CHECK is {text!r}; give the steps between checks, 0 for none")
    return int(text)


class Checks:
    """What is checked while a model trains."""

    def __init__(
        self, world: World, model: nn.Module, buckets: Sequence[BucketRuntime], *, every: int
    ) -> None:
        self._world, self._buckets, self._every = world, tuple(buckets), every
        self._num_steps = 0
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(OwnHook(self._name_early_reader(name, module)))
            for name, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)  # which takes no hooks
        ]

    def is_due(self) -> bool:
        """Whether the step just taken is one to compare replicas after."""
        self._num_steps += 1
        return self._num_steps % self._every == 0

    def compare_replicas(self, posted: str, options: str) -> None:
        """Raise MismatchError if replicas differ (collective).

        Compared are parameters, the order of collectives and the optimizer's hyperparameters.
        """
        own = {
            name: _digest(param.detach())
            for bucket in self._buckets
            for name, param in zip(bucket.plan.names, bucket.params, strict=True)
        }
        own["the order of collectives"] = hashlib.sha256(posted.encode()).hexdigest()[:12]
        own["a hyperparameter"] = hashlib.sha256(options.encode()).hexdigest()[:12]
        everyone = [json.loads(text) for text in self._world.all_gather_text(json.dumps(own))]
        for what in own:
            for rank, other in enumerate(everyone):
                if other[what] != everyone[0][what]:
                    raise MismatchError(
                        f"after step {self._num_steps}, {what} differs between ranks: hash "
                        f"{everyone[0][what]} on rank 0, {other[what]} on rank {rank}. Parameters "
                        "must be changed by the optimizer alone, or alike on every rank"
                    )

    def remove(self) -> None:
        """Detach from the model."""
        for handle in self._handles:
            handle.remove()

    def _name_early_reader(self, name: str, module: nn.Module) -> Any:
        name = name or type(module).__name__

        def hook(_: nn.Module, __: Any, output: Any) -> None:
            pending = [bucket for bucket in self._buckets if bucket.pending]
            if pending and any(_has_nan(tensor) for tensor in _tensors(output)):
                names = [name for bucket in pending for name in bucket.plan.names]
                raise UsageError(
                    f"module {name} computed NaN while {len(names)} parameters were under way "
                    f"({', '.join(names[:4])} ...): it seems to read one through a reference that "
                    "does not wait; read it as an attribute of its module, or call "
                    "optimizer.synchronize() first"
                )

        return hook


def _digest(tensor: Tensor) -> str:
    data = tensor.contiguous().cpu().view(torch.uint8) if tensor.dim() else tensor.reshape(1).cpu()
    return hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


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
