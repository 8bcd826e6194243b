"""Trial steps of torch's own optimizers, taken once in a process and not for each test.

Each `DistributedOptimizer` tries its optimizer by dozens of steps. What comes of them depends on
the class and its options alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def remember_trials() -> None:
    """Have the engine, if it is loaded, take each trial of an optimizer of torch's once."""
    probe: Any = sys.modules.get("dearmpi.engine.probe.probe")
    if probe is None:
        return
    from torch import Tensor

    try_steps, found = probe.try_steps, {}

    def try_once(optimizer: Any, options: Mapping[str, Any], *form: Any, **how: Any) -> Any:
        kind = type(optimizer)
        is_torchs = kind.__module__.startswith("torch.optim.")
        if not is_torchs or any(isinstance(value, Tensor) for value in options.values()):
            return try_steps(optimizer, options, *form, **how)
        used = {name: value for name, value in options.items() if name != "param_names"}
        device = probe.device_of_optimizer(optimizer)
        # kind.step: a test may put another in its place.
        key = (kind, kind.step, repr(used), repr(form), repr(how), str(device))
        if key not in found:
            found[key] = try_steps(optimizer, options, *form, **how)
        return found[key]

    probe.try_steps = try_once
