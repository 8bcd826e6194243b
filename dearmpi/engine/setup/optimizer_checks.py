"""Checks of the optimizer: what it needs to see at once, and so how buckets are cut for it."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from dearmpi.config import CURE_BY_COMPRESS, CURE_BY_GATHER, EngineConfig, Shards
from dearmpi.device.accelerator import device_of
from dearmpi.engine.probe.probe import (
    host_twin,
    require_copied_gradients,
    require_elementwise,
    require_linear,
    require_separable,
    resident_scalars,
)
from dearmpi.engine.probe.steadiness import adapts_its_groups, require_steady
from dearmpi.engine.probe.tensor_wise import require_tensorwise
from dearmpi.errors import ConfigError

Cutting = Shards | Sequence[float]
"""The setting ``shards``: a choice, or a weight for each rank."""


def check_optimizer(optimizer: Optimizer, *, world_size: int, config: EngineConfig) -> Cutting:
    """How buckets are cut for the optimizer. Raises ConfigError if it cannot be served."""
    if not config.has_buckets(world_size):
        if adapts_its_groups(optimizer):
            return "even"  # it sees all parameters at once here
        require_steady(optimizer)  # what cannot run on several ranks is refused on one already
        require_separable(optimizer)
        require_copied_gradients(optimizer)
        if config.needs_linear:
            require_linear(optimizer, config.compress)
        return "even"
    tried = host_twin(optimizer) if config.update_on == "host" else optimizer
    require_steady(tried)
    shards = _require_shards(tried, config)
    require_copied_gradients(tried)
    if config.needs_linear:
        require_linear(tried, config.compress)
    return shards


def _require_shards(optimizer: Optimizer, config: EngineConfig) -> Cutting:
    """How buckets are cut. Raises ConfigError for an optimizer that does not work so."""
    if config.gather == "gradients":
        require_separable(optimizer)
        return "even"
    params = [param for group in optimizer.param_groups for param in group["params"]]
    is_on_host = not params or device_of(params) is None
    if config.shards != "whole":
        try:
            require_elementwise(optimizer)
            return config.shards if config.has_weights else "even"
        except ConfigError as error:
            may_own = config.shards == "auto" and config.can_own_tensors and is_on_host
            if not may_own or error.code not in _MAY_BE_TENSORWISE:
                excludes = config.compress != "none" and not config.can_own_tensors
                if config.shards == "auto" and excludes:
                    raise ConfigError(
                        f"{error}; but compress is {config.compress!r}, with which no tensor has "
                        f"an owner: {CURE_BY_COMPRESS}, or keep it {CURE_BY_GATHER}",
                        code=error.code,
                    ) from error
                raise
    require_separable(optimizer)
    require_tensorwise(optimizer)
    return "whole"


_MAY_BE_TENSORWISE = ("optimizer-needs-whole-tensors", "trial-step-failed")


def find_resident_scalars(
    optimizer: Optimizer, *, world_size: int, config: EngineConfig
) -> tuple[frozenset[str], ...]:
    """By group, names of the state's scalars that lie where the parameters are; none without
    buckets.
    """
    return resident_scalars(optimizer) if config.has_buckets(world_size) else ()


def check_same_cutting(in_use: Cutting, needed: Cutting) -> None:
    """Raise ConfigError unless buckets that are ``in_use`` are cut as is ``needed`` by now."""
    if in_use != needed:
        raise ConfigError(
            f"buckets are cut by shards={in_use!r}, but the options of the optimizer need "
            f"{needed!r} by now, which its state cannot follow; make a new DistributedOptimizer",
            code="settings-contradict",
        )
