"""DeAR: data-parallel PyTorch over MPI with reduce-scatter and all-gather pipelining.

A script needs ``connect`` and ``DistributedOptimizer``::

    world = dearmpi.connect()
    optimizer = dearmpi.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dearmpi import errors as errors
from dearmpi.version import __version__ as __version__

if TYPE_CHECKING:
    from dearmpi.comm.lifecycle import connect
    from dearmpi.comm.watchdog.watchdog import StallLimits
    from dearmpi.comm.world import World
    from dearmpi.config import EngineConfig
    from dearmpi.drop_in.wrapper import DistributedDataParallel
    from dearmpi.engine.optimizer import DistributedOptimizer
    from dearmpi.engine.scaling import GradScaler
    from dearmpi.engine.sync.batch_norm import SyncBatchNorm, convert_sync_batchnorm
    from dearmpi.engine.sync.model_tensors import broadcast_buffers, broadcast_parameters
    from dearmpi.local.area import AucLoss, BalancedBatches, PrimalDual, auc_of
    from dearmpi.local.codasca import Codasca
    from dearmpi.local.local_optimizer import LocalOptimizer
    from dearmpi.local.scaffnew import Scaffnew
    from dearmpi.train.run.script_run import Run
    from dearmpi.tune.device_probe import probe_devices

__all__ = [
    "AucLoss",
    "BalancedBatches",
    "Codasca",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "EngineConfig",
    "GradScaler",
    "LocalOptimizer",
    "PrimalDual",
    "Run",
    "Scaffnew",
    "StallLimits",
    "SyncBatchNorm",
    "World",
    "auc_of",
    "broadcast_buffers",
    "broadcast_parameters",
    "connect",
    "convert_sync_batchnorm",
    "probe_devices",
]

_HOMES = {
    "AucLoss": "dearmpi.local.area",
    "BalancedBatches": "dearmpi.local.area",
    "Codasca": "dearmpi.local.codasca",
    "DistributedDataParallel": "dearmpi.drop_in.wrapper",
    "DistributedOptimizer": "dearmpi.engine.optimizer",
    "EngineConfig": "dearmpi.config",
    "GradScaler": "dearmpi.engine.scaling",
    "LocalOptimizer": "dearmpi.local.local_optimizer",
    "PrimalDual": "dearmpi.local.area",
    "Run": "dearmpi.train.run.script_run",
    "Scaffnew": "dearmpi.local.scaffnew",
    "StallLimits": "dearmpi.comm.watchdog.watchdog",
    "SyncBatchNorm": "dearmpi.engine.sync.batch_norm",
    "World": "dearmpi.comm.world",
    "auc_of": "dearmpi.local.area",
    "broadcast_buffers": "dearmpi.engine.sync.model_tensors",
    "broadcast_parameters": "dearmpi.engine.sync.model_tensors",
    "connect": "dearmpi.comm.lifecycle",
    "convert_sync_batchnorm": "dearmpi.engine.sync.batch_norm",
    "probe_devices": "dearmpi.tune.device_probe",
}


if not TYPE_CHECKING:  # which would take any name for one that there is

    def __getattr__(name: str) -> Any:
        """Import on first use, so that ``import dearmpi`` needs neither torch nor MPI."""
        if name not in _HOMES:
            raise AttributeError(_describe_missing(name))
        if name == "DistributedOptimizer" and "DEAR_TRACE" in os.environ:
            import_module("dearmpi.train.run.tracing").trace_next_optimizer()
        return getattr(import_module(_HOMES[name]), name)


def _describe_missing(name: str) -> str:
    if name.startswith("_"):  # looked for by tools
        return f"module 'dearmpi' has no attribute {name!r}"
    from dearmpi.config import known_names
    from dearmpi.guessed import PACKAGE, answer_guess

    told = answer_guess("dearmpi", name, PACKAGE)
    return told or f"dearmpi has no {name}{known_names(name, __all__)}"


def __dir__() -> list[str]:
    """What there is to import, too."""
    return sorted({*globals(), *__all__})
