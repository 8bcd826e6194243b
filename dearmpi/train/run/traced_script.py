"""Tracing without a change to the script: ``DEAR_TRACE=60:70 mpirun -n 4 python script.py``.

The iterations of the first ``DistributedOptimizer`` that the script makes are recorded in the
folder ``dear-trace``, or in that of ``DEAR_TRACE_FOLDER``, for ``dear-train report``.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from dearmpi.engine.optimizer import CONSTRUCTED, DistributedOptimizer
from dearmpi.train.run.run_folder import RunFolder
from dearmpi.train.run.tracing import Tracing, open_tracing
from dearmpi.train.settings.settings import SETTINGS

VARIABLE = "DEAR_TRACE"
FOLDER_VARIABLE = "DEAR_TRACE_FOLDER"
FOLDER = "dear-trace"

_traced: WeakKeyDictionary[DistributedOptimizer, Tracing] = WeakKeyDictionary()


def read_window(environment: Mapping[str, str]) -> tuple[int, int]:
    """The iterations that ``DEAR_TRACE`` asks for: the first, and the one before which to stop.

    Raises ConfigError for another form than START:STOP.
    """
    window: tuple[int, int] = SETTINGS["trace"].convert(environment[VARIABLE], label=VARIABLE)
    return window


def trace_next_optimizer() -> None:
    """Record the next ``DistributedOptimizer`` that is made, if none has been yet."""
    if not _traced and _begin not in CONSTRUCTED:
        CONSTRUCTED.append(_begin)


def stop_tracing(optimizer: DistributedOptimizer) -> None:
    """Record ``optimizer`` no more, since something else does."""
    if (tracing := _traced.get(optimizer)) is not None:
        tracing.close()


def _begin(optimizer: DistributedOptimizer, model: nn.Module) -> None:
    """Record ``optimizer`` from its first step on (collective)."""
    CONSTRUCTED.remove(_begin)
    start, stop = read_window(os.environ)
    folder = RunFolder(Path(os.environ.get(FOLDER_VARIABLE, FOLDER)))
    tracing = open_tracing(model, optimizer, (start, stop), folder)
    assert tracing is not None
    _traced[optimizer] = tracing
    tracing.begin_iteration(1)
    num_steps = 0

    def after_step(*_: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps <= stop:
            tracing.begin_iteration(num_steps + 1)
        if num_steps == stop and optimizer.world.is_root:
            print(
                f"dearmpi: iterations {start} to {stop - 1} are recorded in {folder.trace}; "
                f"dear-train report {folder.path} draws one",
                file=sys.stderr,
            )

    optimizer.register_step_post_hook(after_step)
    atexit.register(tracing.close)
