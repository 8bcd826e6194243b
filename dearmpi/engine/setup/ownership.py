"""Ownership: which part of a bucket a rank updates: how buckets are cut for an optimizer, as far as
it bears; what the updates of whole tensors cost, and which rank makes which.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from dearmpi.config import CURE_BY_COMPRESS, CURE_BY_GATHER, EngineConfig, Shards
from dearmpi.device.accelerator import device_of
from dearmpi.engine.probe.probe import (
    cost_of_update,
    host_twin,
    require_copied_gradients,
    require_elementwise,
    require_linear,
    require_separable,
    require_tensorwise,
    resident_scalars,
    tensorwise_groups,
)
from dearmpi.engine.probe.steadiness import adapts_its_groups, require_steady
from dearmpi.engine.setup.context import TrainingContext
from dearmpi.engine.sync.model_tensors import compare_tensors
from dearmpi.errors import ConfigError
from dearmpi.plan.data.layout import BucketLayout, weigh
from dearmpi.plan.data.owners import assign_owners, owner_bound
from dearmpi.plan.data.schedule import Schedule

_MOST_SHARE = 0.6  # of all costs: with more in one tensor, owners gain little

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


def find_costs(
    context: TrainingContext, names: Mapping[nn.Parameter, str], known: Mapping[str, float]
) -> Mapping[str, float]:
    """By name, what the updates of parameters cost that the optimizer treats as wholes, the same on
    every rank (collective); frozen ones cost nothing. Warns on rank 0 where one of them is most of
    all.

    known: those that stay as they are. Raises MismatchError if ranks find different parameters.
    """
    optimizer, world = context.optimizer, context.world
    costs: dict[str, float] = {}
    measured: dict[tuple[int, tuple[int, ...]], float] = {}
    for number in sorted(tensorwise_groups(optimizer)):
        group = optimizer.param_groups[number]
        for param in group["params"]:
            if param not in names:
                continue
            name, key = names[param], (number, tuple(param.shape))
            if not param.requires_grad:
                costs[name] = 0.0
                continue
            if not known.get(name) and key not in measured:
                measured[key] = cost_of_update(optimizer, group, param.shape)
            costs[name] = known.get(name) or measured[key]
    compare_tensors(
        sorted(costs),
        world.all_gather_text,
        hosts=world.hosts,
        what="parameters that an owner updates",
        cure="every rank must build the same optimizer",
    )
    shared: dict[str, float] = json.loads(world.broadcast_text(json.dumps(costs)))
    if world.is_root and world.size > 1:
        _warn_of_largest(shared, world.size)
    return shared


def cut_buckets(
    layout: BucketLayout, config: EngineConfig, *, costs: Mapping[str, float], schedule: Schedule
) -> BucketLayout:
    """``layout``, whose buckets are cut evenly, as ``config`` says: with one owner for each
    parameter in ``costs``, which are those of ``find_costs``, or by weights.
    """
    if config.shards == "whole":
        return assign_owners(layout, costs, schedule.reduce_scatters)
    if config.has_weights and config.has_buckets(layout.world_size):
        assert not isinstance(config.shards, str)
        return weigh(layout, config.shards)
    return layout


def _warn_of_largest(costs: Mapping[str, float], size: int) -> None:
    largest = max(costs, key=costs.__getitem__, default="")
    share = costs[largest] / (sum(costs.values()) or 1.0) if costs else 0.0
    if share > _MOST_SHARE:
        warnings.warn(
            f"the update of {largest} is {100 * share:.0f} % of all, and its owner makes it alone: "
            f"it takes at least {owner_bound(costs, size):.2f} times the mean of {size} ranks. "
            "Give it to an optimizer that works element by element, as AdamW does, "
            "or divide the layer",
            stacklevel=9,
        )
