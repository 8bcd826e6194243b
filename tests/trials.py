"""Trial steps of torch's own optimizers, taken once in a process and not for each test.

Each `DistributedOptimizer` tries its optimizer by dozens of steps. What comes of them depends on
the class and its options alone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any


def remember_trials() -> None:
    """Have the engine, if it is loaded, take each trial of an optimizer of torch's once."""
    probe: Any = sys.modules.get("dearmpi.engine.probe.probe")
    spec: Any = sys.modules.get("dearmpi.engine.setup.spec")
    if probe is None or spec is None:
        return
    try_steps, found = probe.try_steps, {}
    check_optimizer, passed = spec.check_optimizer, dict[Any, Any]()
    lock = threading.Lock()

    def try_once(optimizer: Any, options: Mapping[str, Any], *form: Any, **how: Any) -> Any:
        key = _key(optimizer, [options], form, how)
        if key is None:
            return try_steps(optimizer, options, *form, **how)
        if key not in found:
            found[key] = try_steps(optimizer, options, *form, **how)
        return found[key]

    def check_once(optimizer: Any, *, world_size: int, config: Any) -> Any:
        form = (config.has_buckets(world_size), config.update_on, config.gather, config.shards)
        key = _key(optimizer, optimizer.param_groups, form, config.compress, config.needs_linear)
        if key is None:
            return check_optimizer(optimizer, world_size=world_size, config=config)
        with lock:  # of ranks that are threads one tries, and the others wait
            if key not in passed:
                # What is refused is refused anew each time.
                passed[key] = check_optimizer(optimizer, world_size=world_size, config=config)
        return passed[key]

    probe.try_steps, spec.check_optimizer = try_once, check_once


def _key(optimizer: Any, groups: list[Mapping[str, Any]], *form: Any) -> Any:
    """What trials depend on; None where that is not known."""
    import torch

    kind = type(optimizer)
    used = [
        {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for group in groups
    ]
    has_tensors = any(
        isinstance(value, torch.Tensor) for options in used for value in options.values()
    )
    if has_tensors or not kind.__module__.startswith("torch.optim."):
        return None
    device = next(
        (param.device for group in optimizer.param_groups for param in group["params"]), ""
    )
    # What holds in this thread, and what a test may have put in another's place.
    around = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    return (kind, kind.step, *sorted(vars(optimizer)), repr(used), repr(form), str(device), around)
