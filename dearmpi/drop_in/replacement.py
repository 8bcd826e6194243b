"""Replacement: torch's names that scripts use, with dearmpi's classes behind them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import dearmpi
from dearmpi.drop_in.wrapper import DistributedDataParallel


def replace_in_torch() -> None:
    """Have scripts find dearmpi's classes where they look for torch's, or have done so."""
    for places, name, replacement in (
        (
            ("torch.nn.parallel", "torch.nn.parallel.distributed"),
            "DistributedDataParallel",
            DistributedDataParallel,
        ),
        (
            ("torch.nn", "torch.nn.modules", "torch.nn.modules.batchnorm"),
            "SyncBatchNorm",
            SyncBatchNorm,
        ),
        (
            ("torch.distributed.optim", "torch.distributed.optim.zero_redundancy_optimizer"),
            "ZeroRedundancyOptimizer",
            ZeroRedundancyOptimizer,
        ),
    ):
        torchs = getattr(import_module(places[0]), name)
        for place in places:
            setattr(import_module(place), name, replacement)
        if torchs is not replacement:
            _replace_in_loaded(torchs, replacement)


def _replace_in_loaded(torchs: type, replacement: type) -> None:
    """In modules that have imported the name before; torch's own need what they hold."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "dearmpi"):
            continue
        held = getattr(module, "__dict__", {})
        for key in [key for key, value in list(held.items()) if value is torchs]:
            held[key] = replacement


class _AsServed(type(nn.Module)):  # type: ignore[misc]
    """Of a name whose layers are made by ``dearmpi.convert_sync_batchnorm`` as well."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, dearmpi.SyncBatchNorm)


class SyncBatchNorm(dearmpi.SyncBatchNorm, metaclass=_AsServed):
    """torch's SyncBatchNorm by its interface; statistics of all ranks travel over MPI."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``process_group``: of all ranks."""
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """The module with batch normalisations over all ranks."""
        return dearmpi.convert_sync_batchnorm(module)


class ZeroRedundancyOptimizer:
    """torch's, of which nothing is left but the optimizer that it wraps."""

    def __new__(  # type: ignore[misc]
        cls,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> Optimizer:
        """An ``optimizer_class`` with ``defaults``, whose state each rank has whole."""
        optimizer: Any = optimizer_class(params, **defaults)
        optimizer.consolidate_state_dict = _is_consolidated
        made: Optimizer = optimizer
        return made


def _is_consolidated(to: int = 0) -> None:
    """Each rank has the whole state at any time."""
